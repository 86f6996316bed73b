"""LookAheadBudget: decides by measured times how much look-ahead fits before the next verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from outrider_drafter.look_ahead.launch_value import (
    NO_PASS,
    LaunchValue,
    PassPlan,
    next_launch_outcomes,
    plan_pass_start,
)
from outrider_drafter.look_ahead.session_state import LookAheadSession, SelectedOutcomes
from outrider_drafter.look_ahead.timing import DraftStep, StepTimes, VerdictArrivals, VerdictWait
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES, Floats

DEFAULT_MAX_FAN_OUT: Final = 16
"""Outcomes of a proposal where its plan leaves them to the drafter, at most: more are foreseen more
often, but come too late (decision 20)."""
_MAX_OTHERS: Final = 64
"""Sessions beyond those of a pass whose waits are looked at."""
_ANYWAY: Final = 128
"""So many passes that were not worth it are followed by one that is made: things may change."""
_HOPED: Final = 0.8
"""Probability of a hit of which nothing is known."""
_FAN_OUTS: Final = (1, 2, 4, 8, 16, 32)
_SLOWNESS: Final = 16


class LookAheadBudget:
    """Times of draft steps and verdicts, and the decisions on passes. All from one thread.

    Without calls of `record_poll`, nothing is known of when verdicts come, and every pass is made
    whole.
    """

    def __init__(self, now: Callable[[], float], *, in_time: bool) -> None:
        """in_time: whether passes are cut to the time that there is."""
        self._now, self._in_time = now, in_time
        self.steps = StepTimes()
        self._arrivals = VerdictArrivals()
        self._looked_at: float | None = None
        """When messages were looked for last."""
        self._heard = (0.0, 0.0)
        """Between which times what was heard last has come."""
        self._foreseen: dict[DraftStep, Floats] = {}
        """Mean probability that one of so many outcomes comes, by `_FAN_OUTS`."""
        self._passed_over: dict[DraftStep, int] = defaultdict(int)
        self._is_trial = False
        """Whether the present pass is made although it was not found to be worth it."""

    def record_poll(self, *, waited: bool) -> None:
        """Messages were looked for just now; waited: until one came, or for some time."""
        now = self._now()
        before = self._looked_at
        self._heard = (now if waited or before is None else before, now)
        self._looked_at = now

    def forget_connection(self, connection: int) -> None:
        """A connection ended."""
        self._arrivals.forget_connection(connection)

    def record_verdict(self, one: LookAheadSession) -> None:
        """The verdict on a live proposal came with what was heard last."""
        if self._looked_at is not None:
            least, most = self._heard
            least, most = max(least - one.sent_at, 0.0), max(most - one.sent_at, 0.0)
            self._arrivals.observe_arrival(_wait(one), least, most)

    def record_scores(
        self, step: DraftStep, ones: Sequence[LookAheadSession], found: SelectedOutcomes
    ) -> None:
        """These outcomes were found for proposals."""
        for live in range(len(ones)):
            sums = np.cumsum(found.gains[found.lives == live])
            if len(sums):
                told = sums[np.minimum(_FAN_OUTS, len(sums)) - 1]
                known = self._foreseen.get(step)
                self._foreseen[step] = told if known is None else known + (told - known) / _SLOWNESS

    def plan_look_ahead_pass(
        self,
        step: DraftStep,
        ones: Sequence[LookAheadSession],
        watched: Collection[LookAheadSession],
        *,
        straight: bool,
    ) -> tuple[PassPlan, list[LookAheadSession]]:
        """How a pass over some of these proposals begins, and over which. straight: whether the
        last one's scores came to nothing."""
        whole = PassPlan(len(ones), straight)
        self._is_trial = False
        if not self._is_timed:
            return whole, list(ones)
        if any(self._arrivals.is_blind(_wait(one), len(watched)) for one in ones):
            return NO_PASS, []
        stakes = self._stakes(step, [*ones, *self._others(ones, watched)])
        able = sorted(range(len(ones)), key=lambda index: -stakes.seconds_to_verdict[index])
        fan_out = max(one.session.plan.fan_out or DEFAULT_MAX_FAN_OUT for one in ones)
        found = plan_pass_start(
            stakes,
            able,
            score=partial(self.steps.expected_s, step._replace(kind="score")),
            branch=partial(self.steps.expected_s, step._replace(kind="branch")),
            foreseen=partial(self._foresee, step),
            fan_out=fan_out,
        )
        if found.num_proposals:
            straight = straight or found.skips_poll
            return found._replace(skips_poll=straight), [
                ones[i] for i in able[: found.num_proposals]
            ]
        self._passed_over[step] += 1
        if self._passed_over[step] % _ANYWAY:
            return NO_PASS, []
        self._is_trial = True
        self.steps.reset_pass_times(step)
        return whole, list(ones)

    def order_by_value(
        self, step: DraftStep, ones: Sequence[LookAheadSession], found: SelectedOutcomes
    ) -> SelectedOutcomes:
        """Outcomes, likeliest first, by what a draft for each is expected to save, best first."""
        if not (self._is_timed and len(ones) > 1 and len(found.gains)):
            return found
        ends = self.steps.expected_s(step._replace(kind="branch"), len(found.gains))
        saved = np.array(self._stakes(step, ones).seconds_saved(ends))
        if not saved.any():
            return found
        return found.select(np.argsort(-found.gains * saved[found.lives], kind="stable"))

    def next_launch_size(
        self,
        step: DraftStep,
        ones: Sequence[LookAheadSession],
        watched: Collection[LookAheadSession],
        left: SelectedOutcomes,
    ) -> int:
        """How many of the outcomes that are left, in their order, to draft for next; 0: none."""
        here = left.select(slice(0, OUTCOME_BATCH_SIZES[-1]))
        if not self._is_timed or self._is_trial:
            return len(here.lives)
        return next_launch_outcomes(
            self._stakes(step, [*ones, *self._others(ones, watched)]),
            here.lives.tolist(),
            here.gains.tolist(),
            branch=partial(self.steps.expected_s, step._replace(kind="branch")),
        )

    @property
    def _is_timed(self) -> bool:
        return self._in_time and self._looked_at is not None

    def _others(
        self, ones: Sequence[LookAheadSession], watched: Collection[LookAheadSession]
    ) -> Iterable[LookAheadSession]:
        """Other sessions that wait for a verdict."""
        mine = set(map(id, ones))
        waiting = (one for one in watched if one.tree is not None and id(one) not in mine)
        return islice(waiting, _MAX_OTHERS)

    def _stakes(self, step: DraftStep, ones: Sequence[LookAheadSession]) -> LaunchValue:
        now, arrivals = self._now(), self._arrivals
        connection = ones[0].session.key.connection
        return LaunchValue(
            seconds_to_verdict=[
                one.sent_at + arrivals.expected_s(_wait(one)) - now for one in ones
            ],
            covered_probability=[one.covered_probability for one in ones],
            draft_s=self.steps.expected_s(step._replace(kind="draft"), 1),
            exchange_s=arrivals.exchange_latency_s(connection),
        )

    def _foresee(self, step: DraftStep, outcomes: float) -> float:
        """Probability that one of so many outcomes of a session comes."""
        known = self._foreseen.get(step)
        return _HOPED if known is None else float(np.interp(outcomes, _FAN_OUTS, known))


def _wait(one: LookAheadSession) -> VerdictWait:
    return VerdictWait(one.session.key.connection, one.is_hit)
