"""Scheduler: applies the scheduling policy to the core's running sessions to plan the next round.

It submits no round; the rules are in `schedule_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.grammar.constraint import is_slow
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.in_flight_round import is_drafted
from outrider_verifier.engine.schedule_policy import (
    plan_drafted,
    plan_next_in_flight,
    plan_other_half,
    plan_round,
    plan_self_contained,
)
from outrider_verifier.engine.scheduler_inputs import SchedulerInputs
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.planner.two_batch_overlap import TwoBatchOverlap
from outrider_verifier.state.round_plan import RoundEstimates, RoundLimits, RoundPlan
from outrider_verifier.state.session import Session


class Scheduler:
    """Plans rounds from the core's state; it submits none."""

    def __init__(self, core: EngineCore, engine: ModelRunner, limits: RoundLimits) -> None:
        self._core, self._engine, self._limits = core, engine, limits
        self.rows = SchedulerInputs(core, engine)
        self._two_batch_overlap = TwoBatchOverlap(engine.verify_round_s)
        self.half: int | None = None
        """Rows of a half; None: all sessions share a round."""

    def plan_other_half(self, in_flight: RoundPlan, now: float) -> RoundPlan:
        """The round of the other half-batch, to submit after `in_flight`."""
        assert self.half is not None
        return plan_other_half(
            self.rows.all_rows(), now, in_flight, self._limits, max_rows=self.half
        )

    def plan_next_in_flight(self, in_flight: RoundPlan) -> RoundPlan:
        """The round to submit after `in_flight`."""
        found = self.rows.self_contained_rows(in_flight)
        if found is not None:
            names, prefilling, nodes = found
            plan = plan_self_contained(names, self._limits, prefilling, in_process_nodes=nodes)
            if plan is not None:
                return plan
        return plan_next_in_flight(self.rows.all_rows(), in_flight, self._limits)

    def plan_round(self, now: float, *, idle_since: float, round_s: float) -> RoundPlan:
        """The next round where none is in flight; `idle_since`: when the last one ended;
        `round_s`: estimated time of a round; 0 if it is unknown."""
        sessions = self.rows.present()
        held = self._core.inbox.num_nodes([session.handle for session in sessions])
        drafted = self._all_drafted(sessions, held) if self.half is None else None
        if drafted is not None:
            return drafted
        return plan_round(
            list(map(self.rows.row_of, sessions, held)),
            now,
            self._limits,
            idle_since=idle_since,
            max_rows=self.half,
            times=RoundEstimates(answer_s=self._core.policy.slowest_response_s(), round_s=round_s),
        )

    def _all_drafted(self, sessions: Sequence[Session], held: Sequence[int]) -> RoundPlan | None:
        """The next round where there is a proposal, of so many nodes, for all that are past their
        prompts; None: there is not (-1), or something is to be weighed."""
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
        # A proposal may be for a prefix that was there when its session was preempted.
        if not all([_is_drafted_for(session) for session in sessions]):
            return None
        names = [session.spec.session_id for session in sessions]
        prefilling = [self.rows.row_of(session, -1) for session in prompts]
        return plan_drafted(names, held, self._limits, prefilling)

    def update_overlap(self) -> None:
        """Decide whether sessions share a round or take turns, by what is known now."""
        self.half = self._max_rows()

    def _max_rows(self) -> int | None:
        """Rows of a half, if drafted sessions take turns; None: they share a round."""
        policy = self._core.policy
        # Beside an in-process drafter few draft outside, and all share their rounds.
        if self._engine.in_process_draft_length or not (
            self._engine.can_run_ahead and policy.is_automatic
        ):
            return None
        sessions = self._core.block_manager.running.values()
        drafted = [s for s in sessions if s.link_id is not None and is_drafted(s)]
        # Who drafts ahead is at work while a round runs, without halves.
        if not drafted or any(session.looks_ahead for session in drafted):
            return None
        nodes = 1 + max(min(s.plan.draft_tokens, s.draft_limit) for s in drafted)
        return self._two_batch_overlap.max_rows_of_half(
            len(drafted), nodes, policy.slowest_response_s()
        )


def _is_drafted_for(session: Session) -> bool:
    """Whether a session past its prompt is to verify drafts."""
    slow = is_slow(session.constraint)
    return session.draft_wanted and not session.prefill_left and not slow
