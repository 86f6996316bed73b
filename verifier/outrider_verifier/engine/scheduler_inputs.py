"""What the schedule must know of the sessions that run, and the rows that it makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.grammar.constraint import is_slow
from outrider.ids import SessionId
from outrider_verifier.engine.core import Core
from outrider_verifier.engine.in_flight_round import drafted_row
from outrider_verifier.exchange.proposal_inbox import Held
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import RoundRunner
from outrider_verifier.state.round_plan import DecodeRow, RoundPlan, RowState
from outrider_verifier.state.session import Session


class RowStates:
    """Looks at a core's sessions, some microseconds each."""

    def __init__(self, core: Core, engine: RoundRunner, *, decode_tokens: int) -> None:
        """`decode_tokens`: roots and nodes of one round."""
        self._core, self._engine = core, engine
        self._decode_tokens = decode_tokens
        self._rows: dict[int, VerifyRow] = {}
        """Of sessions by their handles, or of those that had them before."""
        self.num_sitting_out = 0
        """Sessions that `present` left out when it was last asked."""

    def present(self) -> list[Session]:
        """The sessions that run, but for those whose slow masks are still being computed: others'
        rounds go on without them."""
        running = list(self._core.room.running.values())
        found = [session for session in running if not _sits_out(session)]
        self.num_sitting_out = len(running) - len(found)
        return found

    def all(self) -> list[RowState]:
        """Of all sessions that can be in a round."""
        sessions = self.present()
        held = self._core.inbox.nodes([session.handle for session in sessions])
        return list(map(self.of, sessions, held))

    def of(self, session: Session, held: int) -> RowState:
        """Of one; `held`: nodes of its proposal, -1 if there is none."""
        spec, left, remaining = session.spec, session.prefill_left, session.remaining
        if session.paused or not session.plan.speculative or is_slow(session.constraint):
            return RowState(
                spec.session_id,
                left,
                None,
                session.since,
                runs_ahead=self.runs_ahead(session),
                remaining=remaining,
                priority=spec.priority,
            )
        # What `draft_wanted` says, with the budget at hand.
        wanted = remaining > 1 and session.draft_limit > 0 and session.wishes_drafts
        if held >= 0 and left == 0 and wanted:
            priority = spec.priority
            return RowState(
                spec.session_id, 0, held, session.since, session.proposal_at, priority=priority
            )
        better = None
        if wanted and left == 0:
            better = self._core.stand_ins.better(session, self._decode_tokens - 1)
        if better is not None:
            return RowState(
                spec.session_id,
                0,
                None,
                session.since,
                own_nodes=len(better.tree),
                stand_in=True,
                priority=spec.priority,
            )
        awaits = session.awaits_proposal
        return RowState(
            spec.session_id,
            left,
            None,
            session.since,
            own_nodes=session.own_depth,
            awaits_proposal=awaits,
            patience_s=self._core.policy.patience(session) if awaits else 0.0,
            runs_ahead=self.runs_ahead(session),
            remaining=remaining,
            priority=spec.priority,
        )

    def alone(self, flying: RoundPlan) -> tuple[list[SessionId], list[RowState], int] | None:
        """The sessions that decode in the round to submit behind `flying`, those with prompt tokens
        left, and how many nodes of own drafts the former have, where none that runs needs anything
        from outside; None: `all` are to be looked at."""
        if not self._engine.run_ahead or self._core.policy.changed:
            return None
        names: list[SessionId] = []
        prefilling: list[RowState] = []
        nodes = 0
        under_way: set[SessionId] | None = None
        for session in self._core.room.running.values():
            if session.wishes_drafts or session.constraint is not None:
                return None
            if session.link_id is not None and not session.paused:
                return None
            spec = session.spec
            if session.prefill_sent < session.fill_to:
                prefilling.append(self.of(session, -1))
                continue
            if session.emitted + 1 >= spec.max_new_tokens:
                # Every round emits a token at least, so the one in flight may be its last.
                under_way = set(flying.session_ids) if under_way is None else under_way
                if spec.session_id in under_way:
                    continue
            names.append(spec.session_id)
            if session.own_draft:
                nodes += session.own_depth
        return names, prefilling, nodes

    def runs_ahead(self, session: Session) -> bool:
        """Whether the session's next round may be submitted before the one in flight is settled."""
        # A drafter that is told of every round could never catch up with one that runs ahead.
        alone = session.link_id is None or (session.paused and self._core.policy.pauses(session))
        # What a grammar allows next, the host finds out from what stands.
        return self._engine.run_ahead and alone and session.constraint is None

    def verified(self, plan: RoundPlan) -> list[VerifyRow]:
        """The rows of a plan, with their proposals taken out of the inbox."""
        sessions = [self._core.sessions[row.session_id] for row in plan.decode]
        if plan.alone:
            return self._bare(sessions)
        drafted = [s.handle for s, row in zip(sessions, plan.decode, strict=True) if row.drafted]
        taken = self._core.inbox.take(drafted) if drafted else []
        if len(taken) == len(sessions) and not any([session.outdone for session in sessions]):
            return list(map(drafted_row, sessions, taken))
        left = iter(taken)
        rows: list[VerifyRow] = []
        room = self._decode_tokens - len(sessions) - sum([held.nodes for held in taken])
        for session, row in zip(sessions, plan.decode, strict=True):
            if row.drafted:
                held = next(left)
                rows.append(self._drafted(session, held, room + held.nodes))
                room -= rows[-1].nodes - held.nodes
                continue
            if row.missed:
                self._core.incoming.missed(session)
            rows.append(self._undrafted(session, row, len(sessions), room))
            room -= rows[-1].nodes
        return rows

    def _drafted(self, session: Session, held: Held, room: int) -> VerifyRow:
        """A row with what its drafter sent, or with what is expected to be better and has room."""
        row = drafted_row(session, held)
        better = self._core.stand_ins.better(session, room)
        return row if better is None else VerifyRow(session, held, draft=better, stand_in=True)

    def _undrafted(self, session: Session, row: DecodeRow, rows: int, room: int) -> VerifyRow:
        """A row of a round of `rows` rows that has none, and room for so many nodes."""
        draft = None
        if row.stand_in:
            draft = self._core.stand_ins.better(session, room)
        elif row.missed or (session.suspect and session.draft_wanted):
            # Nobody waits for a drafter that is suspect.
            draft = self._core.stand_ins.missed(session, rows, room)
        if draft is None:
            return self._bare([session])[0]
        return VerifyRow(session, draft=draft, stand_in=True)

    def _bare(self, sessions: Sequence[Session]) -> list[VerifyRow]:
        """Rows without a draft from outside. Most rounds have only such, and all want the same."""
        found: list[VerifyRow] = []
        for session in sessions:
            row, depth = self._rows.get(session.handle), session.own_draft and session.own_depth
            if is_slow(session.constraint):
                # Each draft would take one more slow mask.
                depth = 0
            if row is None or row.session is not session or row.own_depth != depth:
                row = self._rows[session.handle] = VerifyRow(session, own_depth=depth)
            found.append(row)
        return found


def _sits_out(session: Session) -> bool:
    """Whether the mask of a session's next token is slow and still being computed."""
    constraint = session.constraint
    if constraint is None or not is_slow(constraint) or session.prefill_left:
        return False
    return not constraint.prepare(session.tokens[session.spec.prompt_len : session.length])
