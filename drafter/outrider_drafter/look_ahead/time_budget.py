"""How much of a look-ahead there is time for: what was measured, and what follows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from outrider_drafter.look_ahead.launch_value import NO_PASS, Opening, Stakes, next_slice, opening
from outrider_drafter.look_ahead.session_state import Expected, Watched
from outrider_drafter.look_ahead.timing import Arrivals, Step, StepTimes, Wait
from outrider_drafter.state.outcomes import BRANCH_SIZES, Floats

MAX_FAN_OUT: Final = 16
"""Outcomes of a proposal where its plan leaves them to the drafter, at most: more are foreseen more
often, but come too late (decision 20)."""
_MOST_OTHERS: Final = 64
"""Sessions beyond those of a pass whose waits are looked at."""
_ANYWAY: Final = 128
"""So many passes that were not worth it are followed by one that is made: things may change."""
_HOPED: Final = 0.8
"""Probability of a hit of which nothing is known."""
_FAN_OUTS: Final = (1, 2, 4, 8, 16, 32)
_SLOWNESS: Final = 16


class Pace:
    """Times of steps and of verdicts, and the decisions on passes. All from one thread.

    Where nobody says when messages were looked for (`listened`), nothing is known of when verdicts
    come, and every pass is made whole.
    """

    def __init__(self, now: Callable[[], float], *, in_time: bool) -> None:
        """in_time: whether passes are cut to the time that there is."""
        self._now, self._in_time = now, in_time
        self.steps = StepTimes()
        self._arrivals = Arrivals()
        self._looked_at: float | None = None
        """When messages were looked for last."""
        self._heard = (0.0, 0.0)
        """Between which times what was heard last has come."""
        self._foreseen: dict[Step, Floats] = {}
        """Mean probability that one of so many outcomes comes, by `_FAN_OUTS`."""
        self._passed_over: dict[Step, int] = defaultdict(int)
        self._is_trial = False
        """Whether the present pass is made although it was not found to be worth it."""

    def listened(self, *, waited: bool) -> None:
        """Messages were looked for just now; waited: until one came, or for some time."""
        now = self._now()
        before = self._looked_at
        self._heard = (now if waited or before is None else before, now)
        self._looked_at = now

    def forget(self, connection: int) -> None:
        """A connection ended."""
        self._arrivals.forget(connection)

    def moved(self, one: Watched) -> None:
        """The verdict on a live proposal came with what was heard last."""
        if self._looked_at is not None:
            least, most = self._heard
            least, most = max(least - one.since, 0.0), max(most - one.since, 0.0)
            self._arrivals.saw(_wait(one), least, most)

    def scored(self, step: Step, ones: Sequence[Watched], found: Expected) -> None:
        """These outcomes were found for proposals."""
        for live in range(len(ones)):
            sums = np.cumsum(found.gains[found.lives == live])
            if len(sums):
                told = sums[np.minimum(_FAN_OUTS, len(sums)) - 1]
                known = self._foreseen.get(step)
                self._foreseen[step] = told if known is None else known + (told - known) / _SLOWNESS

    def opening(
        self, step: Step, ones: Sequence[Watched], watched: Collection[Watched], *, straight: bool
    ) -> tuple[Opening, list[Watched]]:
        """How a pass over some of these proposals begins, and over which. straight: whether the
        last one's scores came to nothing."""
        whole = Opening(len(ones), straight)
        self._is_trial = False
        if not self._is_timed:
            return whole, list(ones)
        if any(self._arrivals.is_blind(_wait(one), len(watched)) for one in ones):
            return NO_PASS, []
        stakes = self._stakes(step, [*ones, *self._others(ones, watched)])
        able = sorted(range(len(ones)), key=lambda index: -stakes.due[index])
        fan_out = max(one.session.plan.fan_out or MAX_FAN_OUT for one in ones)
        found = opening(
            stakes,
            able,
            score=partial(self.steps.expect, step._replace(kind="score")),
            branch=partial(self.steps.expect, step._replace(kind="branch")),
            foreseen=partial(self._foresee, step),
            fan_out=fan_out,
        )
        if found.lives:
            straight = straight or found.straight
            return found._replace(straight=straight), [ones[i] for i in able[: found.lives]]
        self._passed_over[step] += 1
        if self._passed_over[step] % _ANYWAY:
            return NO_PASS, []
        self._is_trial = True
        self.steps.forget_pass(step)
        return whole, list(ones)

    def in_order(self, step: Step, ones: Sequence[Watched], found: Expected) -> Expected:
        """Outcomes, likeliest first, by what a draft for each is expected to save, best first."""
        if not (self._is_timed and len(ones) > 1 and len(found.gains)):
            return found
        ends = self.steps.expect(step._replace(kind="branch"), len(found.gains))
        saved = np.array(self._stakes(step, ones).saved(ends))
        if not saved.any():
            return found
        return found.only(np.argsort(-found.gains * saved[found.lives], kind="stable"))

    def next_slice(
        self, step: Step, ones: Sequence[Watched], watched: Collection[Watched], left: Expected
    ) -> int:
        """How many of the outcomes that are left, in their order, to draft for next; 0: none."""
        here = left.only(slice(0, BRANCH_SIZES[-1]))
        if not self._is_timed or self._is_trial:
            return len(here.lives)
        return next_slice(
            self._stakes(step, [*ones, *self._others(ones, watched)]),
            here.lives.tolist(),
            here.gains.tolist(),
            branch=partial(self.steps.expect, step._replace(kind="branch")),
        )

    @property
    def _is_timed(self) -> bool:
        return self._in_time and self._looked_at is not None

    def _others(self, ones: Sequence[Watched], watched: Collection[Watched]) -> Iterable[Watched]:
        """Other sessions that wait for a verdict."""
        mine = set(map(id, ones))
        waiting = (one for one in watched if one.tree is not None and id(one) not in mine)
        return islice(waiting, _MOST_OTHERS)

    def _stakes(self, step: Step, ones: Sequence[Watched]) -> Stakes:
        now, arrivals = self._now(), self._arrivals
        connection = ones[0].session.key.connection
        return Stakes(
            due=[one.since + arrivals.expect(_wait(one)) - now for one in ones],
            covered=[one.covered for one in ones],
            draft_s=self.steps.expect(step._replace(kind="draft"), 1),
            exchange_s=arrivals.exchange(connection),
        )

    def _foresee(self, step: Step, outcomes: float) -> float:
        """Probability that one of so many outcomes of a session comes."""
        known = self._foreseen.get(step)
        return _HOPED if known is None else float(np.interp(outcomes, _FAN_OUTS, known))


def _wait(one: Watched) -> Wait:
    return Wait(one.session.key.connection, one.is_hit)
