"""Builds the scheduler's view (`RowState`) of running sessions, and the verify rows of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.grammar.constraint import is_slow
from outrider.ids import SessionId
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.in_flight_round import make_verify_row
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.state.round_plan import RoundPlan, RowState
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import PREFILLING


class SchedulerInputs:
    """Reads the scheduler's inputs from a core's sessions, in some microseconds each."""

    def __init__(self, core: EngineCore, engine: ModelRunner) -> None:
        self._core, self._engine = core, engine
        self._rows: dict[int, VerifyRow] = {}
        """Of sessions by their handles, or of those that had them before."""
        self.num_sitting_out = 0
        """Sessions that `present` left out when it was last asked."""

    def present(self) -> list[Session]:
        """The sessions that run, but for those whose slow masks are still being computed: others'
        rounds go on without them."""
        running = list(self._core.block_manager.running.values())
        found = [session for session in running if not _sits_out(session)]
        self.num_sitting_out = len(running) - len(found)
        return found

    def all_rows(self) -> list[RowState]:
        """Of all sessions that can be in a round."""
        sessions = self.present()
        held = self._core.inbox.num_nodes([session.handle for session in sessions])
        return list(map(self.row_of, sessions, held))

    def row_of(self, session: Session, held: int) -> RowState:
        """Of one; `held`: nodes of its proposal, -1 if there is none."""
        spec, left, remaining = session.spec, session.prefill_left, session.remaining
        if (
            session.is_speculation_off
            or not session.plan.is_speculative
            or is_slow(session.constraint)
        ):
            return RowState(
                spec.session_id,
                left,
                None,
                session.root_known_at,
                runs_ahead=self.can_run_ahead(session),
                tokens_left=remaining,
                priority=spec.priority,
            )
        # What `draft_wanted` says, with the budget at hand.
        wanted = remaining > 1 and session.draft_limit > 0 and session.wants_outside_drafts
        if held >= 0 and left == 0 and wanted:
            priority = spec.priority
            return RowState(
                spec.session_id,
                0,
                held,
                session.root_known_at,
                session.proposal_at,
                priority=priority,
            )
        awaits = session.awaits_proposal
        return RowState(
            spec.session_id,
            left,
            None,
            session.root_known_at,
            in_process_nodes=session.in_process_depth,
            awaits_proposal=awaits,
            proposal_timeout_s=self._core.policy.proposal_timeout_s(session) if awaits else 0.0,
            runs_ahead=self.can_run_ahead(session),
            tokens_left=remaining,
            priority=spec.priority,
        )

    def self_contained_rows(
        self, in_flight: RoundPlan
    ) -> tuple[list[SessionId], list[RowState], int] | None:
        """The sessions that decode in the round to submit behind `in_flight`, those with prompt
        tokens left, and how many nodes of in-process drafts the former have, where none that runs
        needs anything from outside; None: `all` are to be looked at."""
        if not self._engine.can_run_ahead or self._core.policy.changed:
            return None
        names: list[SessionId] = []
        prefilling: list[RowState] = []
        nodes = 0
        under_way: set[SessionId] | None = None
        for session in self._core.block_manager.running.values():
            if session.wants_outside_drafts or session.constraint is not None:
                return None
            if session.link_id is not None and not session.is_speculation_off:
                return None
            spec = session.spec
            if session.phase is PREFILLING:
                prefilling.append(self.row_of(session, -1))
                continue
            if session.emitted + 1 >= spec.max_new_tokens:
                # Every round emits a token at least, so the one in flight may be its last.
                under_way = set(in_flight.session_ids) if under_way is None else under_way
                if spec.session_id in under_way:
                    continue
            names.append(spec.session_id)
            if session.in_process_draft_length:
                nodes += session.in_process_depth
        return names, prefilling, nodes

    def can_run_ahead(self, session: Session) -> bool:
        """Whether the session's next round may be submitted before the one in flight is settled."""
        # A drafter that is told of every round could never catch up with one that runs ahead.
        alone = session.link_id is None or (
            session.is_speculation_off and self._core.policy.should_pause(session)
        )
        # What a grammar allows next, the host finds out from what stands.
        return self._engine.can_run_ahead and alone and session.constraint is None

    def take_verify_rows(self, plan: RoundPlan) -> list[VerifyRow]:
        """The rows of a plan, with their proposals taken out of the inbox."""
        sessions = [self._core.sessions[row.session_id] for row in plan.decode]
        if plan.is_self_contained:
            return self._bare(sessions)
        drafted = [
            s.handle for s, row in zip(sessions, plan.decode, strict=True) if row.has_proposal
        ]
        taken = self._core.inbox.take_proposals(drafted) if drafted else []
        if len(taken) == len(sessions):
            return list(map(make_verify_row, sessions, taken))
        left = iter(taken)
        rows: list[VerifyRow] = []
        for session, row in zip(sessions, plan.decode, strict=True):
            if row.has_proposal:
                rows.append(make_verify_row(session, next(left)))
                continue
            if row.is_timed_out:
                self._core.incoming.record_timeout(session)
            rows += self._bare([session])
        return rows

    def _bare(self, sessions: Sequence[Session]) -> list[VerifyRow]:
        """Rows without a draft from outside. Most rounds have only such, and all want the same."""
        found: list[VerifyRow] = []
        for session in sessions:
            row, depth = (
                self._rows.get(session.handle),
                session.in_process_draft_length and session.in_process_depth,
            )
            if is_slow(session.constraint):
                # Each draft would take one more slow mask.
                depth = 0
            if row is None or row.session is not session or row.in_process_depth != depth:
                row = self._rows[session.handle] = VerifyRow(session, in_process_depth=depth)
            found.append(row)
        return found


def _sits_out(session: Session) -> bool:
    """Whether the mask of a session's next token is slow and still being computed."""
    constraint = session.constraint
    if constraint is None or not is_slow(constraint) or session.prefill_left:
        return False
    return not constraint.prepare(session.tokens[session.spec.prompt_len : session.length])
