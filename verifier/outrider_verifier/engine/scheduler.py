"""Scheduler plans the next round from the core's running sessions.

It turns speculation and look-ahead of sessions on and off as the planner decides, builds the
`RowState` of each session, from which `schedule_policy` makes a plan, and builds the verify rows of
a plan. It submits no round.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.grammar.constraint import is_slow
from outrider.ids import SessionId
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.in_flight_round import InFlightRound, is_drafted, make_verify_row
from outrider_verifier.engine.schedule_policy import (
    plan_drafted,
    plan_next_in_flight,
    plan_other_half,
    plan_round,
    plan_self_contained,
)
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.planner.two_batch_overlap import TwoBatchOverlap
from outrider_verifier.state.round_plan import RoundEstimates, RoundLimits, RoundPlan, RowState
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED, PREFILLING


class Scheduler:
    """Plans rounds from the core's state, but does not submit them."""

    def __init__(self, core: EngineCore, engine: ModelRunner, limits: RoundLimits) -> None:
        self._core, self._engine, self._limits = core, engine, limits
        self._rows: dict[int, VerifyRow] = {}
        """Cached rows without proposals by session handle. An entry may belong to an earlier
        session with the same handle."""
        self.num_sitting_out = 0
        """Number of sessions that the last plan left out because their grammar masks are not
        ready."""
        self._two_batch_overlap = TwoBatchOverlap(engine.verify_round_s)
        self.half: int | None = None
        """Maximum number of rows of a half-batch; None if all sessions share a round."""

    def plan_other_half(self, in_flight: RoundPlan, now: float) -> RoundPlan:
        """Return the round of the other half-batch, to submit after `in_flight`."""
        assert self.half is not None
        return plan_other_half(self._all_rows(), now, in_flight, self._limits, max_rows=self.half)

    def plan_next_in_flight(self, in_flight: RoundPlan) -> RoundPlan:
        """Return the round to submit while `in_flight` runs, or an empty plan if `in_flight` must
        be finished first."""
        found = self._self_contained_rows(in_flight)
        if found is not None:
            names, prefilling, nodes = found
            plan = plan_self_contained(names, self._limits, prefilling, in_process_nodes=nodes)
            if plan is not None:
                return plan
        return plan_next_in_flight(self._all_rows(), in_flight, self._limits)

    def plan_round(self, now: float, *, idle_since: float, round_s: float) -> RoundPlan:
        """Return the next round while none is in flight, or an empty plan with the time to wait
        until. `idle_since` is the time when the last round ended. `round_s` is the estimated time
        of a round in seconds, or 0 if unknown."""
        sessions = self._present()
        held = self._held_nodes(sessions)
        drafted = self._all_drafted(sessions, held) if self.half is None else None
        if drafted is not None:
            return drafted
        return plan_round(
            list(map(self._row_of, sessions, held)),
            now,
            self._limits,
            idle_since=idle_since,
            max_rows=self.half,
            times=RoundEstimates(answer_s=self._core.policy.slowest_response_s(), round_s=round_s),
        )

    def _all_drafted(self, sessions: Sequence[Session], held: Sequence[int]) -> RoundPlan | None:
        """Return the next round if every session past its prompt has a proposal and none must yield
        to a prompt, else None. `held` is the number of nodes of each session's proposal, -1 for
        sessions without one."""
        prompts: list[Session] = []
        if min(held, default=0) < 0:
            prompts = [session for session, nodes in zip(sessions, held, strict=True) if nodes < 0]
            if not all([session.prefill_left > 0 for session in prompts]):
                return None
            sessions = [each for each, nodes in zip(sessions, held, strict=True) if nodes >= 0]
            held = [nodes for nodes in held if nodes >= 0]
            highest = max([session.spec.priority for session in prompts])
            if any([session.spec.priority < highest for session in sessions]):
                return None
        # A session that was preempted may still hold a proposal.
        if not all([_is_drafted_for(session) for session in sessions]):
            return None
        names = [session.spec.session_id for session in sessions]
        prefilling = [self._row_of(session, -1) for session in prompts]
        return plan_drafted(names, held, self._limits, prefilling)

    def plan_prefetched_round(
        self, in_flight: InFlightRound, counts: Sequence[int]
    ) -> tuple[RoundPlan, list[VerifyRow]] | None:
        """Plan the next round from prefetched proposals: drafts that arrived while `in_flight` ran
        and continue its outcome. The tokens of `in_flight` are not yet committed. `counts` is the
        number of tokens that each of its decode rows has emitted.

        Return the plan and one verify row per session of `in_flight`, with its proposal, which is
        removed from the inbox. Return None if the tokens must be committed first, because a draft
        is missing or a session ends.
        """
        core = self._core
        sessions = [row.session for row in in_flight.verify]
        if len(sessions) != len(core.block_manager.running):
            return None
        handles = [session.handle for session in sessions]
        nodes = core.inbox.num_nodes(handles)
        plan = plan_drafted([session.spec.session_id for session in sessions], nodes, self._limits)
        if plan is None:
            return None
        for session, count, deep in zip(sessions, counts, nodes, strict=True):
            if not _is_ready(session, count, deep):
                return None
        for session in sessions:
            # The drafter is healthy, even if earlier proposals were late.
            session.has_stalled_drafter = False
        return plan, list(map(VerifyRow, sessions, core.inbox.take_proposals(handles)))

    # ---- changes before a round -----------------------------------------------------------------

    def update_speculation(self, now: float, *, in_flight: RoundPlan | None) -> None:
        """Before a round is planned, pause and resume speculation and look-ahead of sessions if the
        policy's decisions have changed. `in_flight` is the plan of the round in flight."""
        core, policy = self._core, self._core.policy
        policy.begin_round(len(core.block_manager.running), now)
        if not policy.changed:
            return
        policy.changed = False
        core.touched += 1
        under_way = set() if in_flight is None else set(in_flight.session_ids)
        for session in core.sessions.values():
            session.draft_limit = policy.draft_limit(session)
            pauses = policy.should_pause(session)
            if pauses == session.is_speculation_off:
                pass
            elif session.link_id is not None and session.session_id in under_way:
                # The drafter must receive the round in flight, so decide again after this round.
                policy.changed = True
            elif pauses:
                policy.record_pause(session, paused=True)
                session.recheck_blocks()
                core.counters["speculation_paused"] += 1
            else:
                self._resume(session, now)
            if not session.is_speculation_off:
                self._update_look_ahead(session)

    def _update_look_ahead(self, session: Session) -> None:
        """Turn the look-ahead of the session's drafter on or off; this may happen while a round is
        in flight."""
        core = self._core
        ahead = core.policy.should_look_ahead(session)
        if ahead == session.is_look_ahead_on:
            return
        core.policy.record_look_ahead(session, ahead=ahead)
        core.counters["look_ahead_started" if ahead else "look_ahead_ended"] += 1
        if session.link_id is not None:
            core.drafters.send_plan(session)

    def _resume(self, session: Session, now: float) -> None:
        """Resume the speculation of a paused session. No round that its drafter must receive may be
        in flight with the session."""
        core = self._core
        core.policy.record_pause(session, paused=False)
        core.counters["speculation_resumed"] += 1
        # The drafter receives the root only now, so the wait for its proposal begins now.
        session.root_known_at = now
        if session.link_id is not None and core.verdict_builder.can_catch_up(session):
            for message in core.verdict_builder.build_catch_up(session):
                core.drafters.send_message(session, message)
            return
        core.drafters.withdraw(session)
        core.drafters.announce(session)
        if session.link_id is None:
            core.drafters.advance_without_speculation(session)

    def update_overlap(self) -> None:
        """Decide whether sessions share a round or alternate in two half-batches, from current
        measurements."""
        self.half = self._max_rows()

    def _max_rows(self) -> int | None:
        """Return the maximum number of rows of a half-batch if drafted sessions alternate; None if
        they share a round."""
        policy = self._core.policy
        # With an in-process drafter, few sessions have other drafters, and all share their
        # rounds.
        if self._engine.in_process_draft_length or not (
            self._engine.can_run_ahead and policy.is_automatic
        ):
            return None
        sessions = self._core.block_manager.running.values()
        drafted = [s for s in sessions if s.link_id is not None and is_drafted(s)]
        # With look-ahead, drafters already work while a round runs.
        if not drafted or any(session.looks_ahead for session in drafted):
            return None
        nodes = 1 + max(min(s.plan.draft_tokens, s.draft_limit) for s in drafted)
        return self._two_batch_overlap.max_rows_of_half(
            len(drafted), nodes, policy.slowest_response_s()
        )

    # ---- rows -----------------------------------------------------------------------------------

    def _present(self) -> list[Session]:
        """Return the running sessions, except those whose slow grammar masks are still being
        computed, so that other sessions' rounds do not wait for the masks."""
        running = list(self._core.block_manager.running.values())
        found = [session for session in running if not _sits_out(session)]
        self.num_sitting_out = len(running) - len(found)
        return found

    def _all_rows(self) -> list[RowState]:
        """Return the `RowState` of each session that can be in a round."""
        sessions = self._present()
        held = self._held_nodes(sessions)
        return list(map(self._row_of, sessions, held))

    def _held_nodes(self, sessions: Sequence[Session]) -> list[int]:
        """Return the number of nodes of each session's proposal, -1 if it has none."""
        if not any(session.wants_outside_drafts for session in sessions):
            return [-1] * len(sessions)
        return self._core.inbox.num_nodes([session.handle for session in sessions])

    def _row_of(self, session: Session, held: int) -> RowState:
        """Return the `RowState` of a session. `held` is the number of nodes of its proposal, -1 if
        it has none."""
        spec, left, remaining = session.spec, session.prefill_left, session.remaining
        if (
            session.is_speculation_off
            or not session.plan.is_speculative
            or _has_slow_masks(session)
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
        # This is `draft_wanted`, with the remaining tokens already computed.
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

    def _self_contained_rows(
        self, in_flight: RoundPlan
    ) -> tuple[list[SessionId], list[RowState], int] | None:
        """Return what `plan_self_contained` needs for the round after `in_flight`: the decoding
        sessions, the sessions with prompt tokens left, and the number of nodes of all in-process
        drafts. Return None if a running session needs proposals or the host between rounds."""
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
                prefilling.append(self._row_of(session, -1))
                continue
            if session.emitted + 1 >= spec.max_new_tokens:
                # Every round emits at least one token, so the round in flight may be the
                # session's last.
                under_way = set(in_flight.session_ids) if under_way is None else under_way
                if spec.session_id in under_way:
                    continue
            names.append(spec.session_id)
            if session.in_process_draft_length:
                nodes += session.in_process_depth
        return names, prefilling, nodes

    def can_run_ahead(self, session: Session) -> bool:
        """Return whether the session's next round may be submitted before the round in flight is
        finished."""
        # A drafter that receives every round could never catch up with a session that runs ahead.
        alone = session.link_id is None or (
            session.is_speculation_off and self._core.policy.should_pause(session)
        )
        # The host computes a grammar's next mask from the accepted tokens.
        return self._engine.can_run_ahead and alone and session.constraint is None

    def take_verify_rows(self, plan: RoundPlan) -> list[VerifyRow]:
        """Return the verify rows of a plan, one per decoding session. Their proposals are removed
        from the inbox."""
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
        """Return rows without proposals. They are cached, because most rounds have only such rows
        and the rows rarely change."""
        found: list[VerifyRow] = []
        for session in sessions:
            row, depth = (
                self._rows.get(session.handle),
                session.in_process_draft_length and session.in_process_depth,
            )
            if _has_slow_masks(session):
                # Each draft token would need one more slow mask.
                depth = 0
            if row is None or row.session is not session or row.in_process_depth != depth:
                row = self._rows[session.handle] = VerifyRow(session, in_process_depth=depth)
            found.append(row)
        return found


def _is_drafted_for(session: Session) -> bool:
    """Return whether a session is past its prompt and should verify drafts."""
    wanted = session.draft_wanted and not session.prefill_left
    return wanted and not _has_slow_masks(session)


def _is_ready(session: Session, count: int, nodes: int) -> bool:
    """Return whether a draft of `nodes` nodes can be verified uncut once `count` tokens are
    committed."""
    if session.constraint is not None or session.phase is ENDED or not session.draft_wanted:
        return False
    # A round emits one token beyond the draft, and a draft is never deeper than its number of
    # nodes.
    left = session.remaining - count - 1
    if not 0 <= nodes <= left or nodes > session.draft_limit or not left:
        return False
    return session.length + count <= session.covered_len


def _sits_out(session: Session) -> bool:
    """Return whether the mask of a session's next token is slow and still being computed."""
    constraint = session.constraint
    if constraint is None or not is_slow(constraint) or session.prefill_left:
        return False
    return not constraint.prepare(session.tokens[session.spec.prompt_len : session.length])


def _has_slow_masks(session: Session) -> bool:
    return session.constraint is not None and is_slow(session.constraint)
