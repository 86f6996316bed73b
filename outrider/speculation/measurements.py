"""Statistics of measured rounds: times with stalls cut off, and tokens per row. Pure.

Round times vary little but for stalls: the last few of them, stalls cut off, tell the time of a
round. Tokens vary much from row to row and not at all from load to load: they are counted by rows,
with their variance, so that 64 sessions know after a few rounds what a single one knows after many.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from operator import mul
from typing import Final

WINDOW_ROUNDS: Final = 16
"""Rounds that tell what one takes."""
OUTLIER_FACTOR: Final = 3.0
"""Usual rounds that one round counts as at most: a stall says nothing of a mode."""
MAX_STALL_SHARE: Final = 1.0 / 8.0
"""Share of the last rounds that may be stalls, each of which every session meets once. What is as
long more often is of the mode: drafts that were not made ahead can take several times as long as
those that were."""
STALL_FACTOR: Final = 2.0
"""Usual rounds beyond which one was held up, if it is alone."""
MIN_USUAL_ROUNDS: Final = 0.5
"""Rounds without which nobody knows what is usual: a start is one of parts."""
STALL_DECAY: Final = 1.0 / 16.0
"""How much of a stall is forgotten with a round that was none."""
TIME_NOISE: Final = 0.15
"""Deviation of one round's time, as a share of it."""
UNSEEN_VARIANCE: Final = 2.0
"""Variance of a row's tokens that was missed, over the rows seen: a few equal ones are no proof
that all are."""
MIN_STD_ERRORS: Final = 1.5
"""Standard errors that make a difference."""


@dataclass(slots=True)
class RoundObservation:
    """One observed round of a workload class; sums over its rows."""

    rows: int
    tokens: float
    squares: float
    """Of each row's tokens."""
    seconds: float
    """Of each row since the one before it ended, what prompts took left out."""
    sessions: int
    """Of this kind, in this round or not."""
    is_load_steady: bool = True
    """Whether it says more of the mode than of the change to it."""
    is_timed: bool = True
    """Whether its seconds tell anything."""
    eligible_share: float = 1.0
    """Share of the sessions that could speculate, in [0, 1]."""
    weight: int = 1
    """Rounds like it, itself included, of which nothing else was seen."""

    @property
    def rounds(self) -> float:
        """Rounds of all sessions that this makes."""
        return self.rows / max(1, self.sessions)

    @property
    def round_s(self) -> float:
        """Seconds of a row."""
        return self.seconds / self.rows


@dataclass(slots=True)
class RoundTimeWindow:
    """Times of the last `window` rounds. Kept sorted, too, because their mean is read after nearly
    every round."""

    window: int = WINDOW_ROUNDS
    _last: deque[tuple[float, float]] = field(default_factory=deque)
    """(seconds, weight) of each, the oldest one first."""
    _ranked: list[tuple[float, float]] = field(default_factory=list)
    """The same, the shortest one first."""
    rounds: float = 0.0
    """How many rounds these are."""
    _seconds: float = 0.0
    """Of all of them, stalls as long as they were."""
    _mean: float = math.nan
    _error: float = math.nan
    """nan: yet to be worked out."""
    _stale: bool = False
    """Whether `_mean` is yet to be worked out: most rounds tell what nobody asks."""

    def observe_round(self, seconds: float, rounds: float = 1.0) -> None:
        """A round took `seconds`; one of a part of the sessions counts as a part of a round."""
        ranked, seen = self._ranked, (seconds, rounds)
        self._last.append(seen)
        insort(ranked, seen)
        self.rounds += rounds
        self._seconds += rounds * seconds
        if len(ranked) > self.window:
            oldest = self._last.popleft()
            del ranked[bisect_left(ranked, oldest)]
            self.rounds -= oldest[1]
            self._seconds -= oldest[0] * oldest[1]
        self._stale, self._error = True, math.nan

    def _work_out(self) -> float:
        ranked = self._ranked
        # Mostly none can be a stall.
        if ranked[-1][0] <= OUTLIER_FACTOR * ranked[0][0]:
            return self._seconds / self.rounds
        lasted, weights = zip(*ranked, strict=True)
        most = OUTLIER_FACTOR * self._longest_usual()
        usual = bisect_right(lasted, most)
        lasted = (*lasted[:usual], *[most] * (len(lasted) - usual))
        mean: float = sum(map(mul, lasted, weights)) / sum(weights)
        return mean

    def _longest_usual(self) -> float:
        """The longest that is no stall, and at least the median."""
        ranked = self._ranked
        place, above = len(ranked) - 1, 0.0
        while (
            place > (len(ranked) - 1) // 2
            and above + ranked[place][1] <= MAX_STALL_SHARE * self.window
        ):
            above += ranked[place][1]
            place -= 1
        return ranked[place][0]

    def clear(self) -> None:
        """Begin anew."""
        self._last.clear()
        self._ranked.clear()
        self.rounds = self._seconds = 0.0
        self._mean, self._error, self._stale = math.nan, math.nan, False

    @property
    def mean_s(self) -> float:
        """Seconds of a round; nan while nothing is known."""
        if self._stale:
            self._mean, self._stale = self._work_out(), False
        return self._mean

    @property
    def error(self) -> float:
        """Standard error of `mean_s` as a share of it, infinite while nothing is known."""
        if not self._ranked:
            return math.inf
        if math.isnan(self._error):
            self._error = self._work_out_error()
        return self._error

    def _work_out_error(self) -> float:
        rounds = self.rounds
        mean = self.mean_s
        off = [(weight, self.clip_outlier(value) / mean - 1.0) for value, weight in self._ranked]
        spread = sum([weight * value * value for weight, value in off]) / rounds
        return math.sqrt((spread + TIME_NOISE**2 / rounds) / rounds)

    def clip_outlier(self, seconds: float) -> float:
        """`seconds` of one more round, or as much as a stall counts as."""
        return min(seconds, OUTLIER_FACTOR * self.mean_s) if len(self._ranked) > 2 else seconds


@dataclass(slots=True)
class StallDetector:
    """Distinguishes stalled rounds from a mode that has become slow, by their share."""

    _met: float = 0.0
    """Rounds of late that took too long."""

    def is_stall(self, seen: RoundObservation, usual: RoundTimeWindow) -> bool:
        """Whether a round, `seen`, was: its seconds tell nothing of what such rounds take, which
        was `usual` before it."""
        known = seen.is_timed and usual.rounds >= MIN_USUAL_ROUNDS
        if not known or seen.round_s <= STALL_FACTOR * usual.mean_s:
            self._met = max(0.0, self._met - STALL_DECAY * seen.rounds)
            return False
        self._met = min(self._met + seen.rounds, MAX_STALL_SHARE * WINDOW_ROUNDS + 1.0)
        return self._met <= MAX_STALL_SHARE * WINDOW_ROUNDS


@dataclass(slots=True)
class EmissionStats:
    """Tokens that rows emitted; rows of one session each."""

    rows: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    rounds: float = 0.0

    def add_rows(self, rows: float, tokens: float, squares: float, rounds: float) -> None:
        """In `rounds`, `rows` emitted `tokens`; `squares`: the sum of the squares of each row's."""
        self.rows += rows
        self.tokens += tokens
        self.squares += squares
        self.rounds += rounds

    def add_observation(self, seen: RoundObservation) -> None:
        """Add what was seen of a round."""
        self.add_rows(seen.rows, seen.tokens, seen.squares, seen.rounds)

    def decay(self, half_lives: float) -> None:
        """Count what is known less."""
        keep = 0.5**half_lives
        self.rows *= keep
        self.tokens *= keep
        self.squares *= keep
        self.rounds *= keep

    @property
    def mean(self) -> float:
        """Tokens of a row; nan while nothing is known."""
        return self.tokens / self.rows if self.rows > 0.0 else math.nan

    @property
    def variance(self) -> float:
        """How uncertain that mean is; infinite while nothing is known."""
        if not self.rows > 0.0:
            return math.inf
        mean = self.mean
        return (self.squares / self.rows - mean * mean + UNSEEN_VARIANCE / self.rows) / self.rows

    def is_below(
        self,
        needed: float,
        *,
        sure: float = MIN_STD_ERRORS,
        time_noise: float = TIME_NOISE,
        unsure: float = 0.0,
    ) -> bool:
        """Whether rows emit fewer than `needed` tokens, chance and the noise of times aside;
        `unsure`: the standard error of what is needed, as a share of it, besides."""
        if not self.rounds > 0.0:
            return False
        noise = time_noise**2 / self.rounds + unsure**2
        error = math.sqrt(self.variance + noise * needed * needed)
        return self.mean + sure * error < needed
