"""Statistics of measured rounds: typical values without outliers, and tokens per row. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from outrider_verifier.state.round_plan import TIME_EMA_WEIGHT

WINDOW_ROUNDS: Final = 32
"""Rounds of which the mean is taken: the times of rounds vary little."""
MAX_VALUES: Final = 256
"""Values that are kept, of rounds with few of the sessions."""
OUTLIER_FACTOR: Final = 3.0
"""A round counts as at most this many times the longest usual one. Usual are all but the longest
eighth of the window: a host that is held up for a moment says nothing about a draft shape."""
TIME_NOISE: Final = 0.15
"""Assumed standard deviation of one round's time, as a share of it."""
UNSEEN_VARIANCE: Final = 2.0
"""Variance of a row's token count that few rows may have missed."""


def moving_average(before_s: float, seconds: float) -> float:
    """A moving average of times with one more; a round that was held up counts as
    `OUTLIER_FACTOR` usual ones."""
    return before_s + TIME_EMA_WEIGHT * (min(seconds, OUTLIER_FACTOR * before_s) - before_s)


@dataclass(slots=True)
class RoundMean:
    """Weighted mean of positive values of the last `WINDOW_ROUNDS` rounds, outliers clipped."""

    rounds: float = 0.0
    """Sum of the weights."""
    _values: deque[tuple[float, float]] = field(default_factory=deque)
    """(value, weight), the oldest first."""
    _mean: float = math.nan
    _is_stale: bool = False

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add the value of a round; `weight`: 1, or less where it tells less."""
        values = self._values
        values.append((value, weight))
        self.rounds += weight
        while len(values) > MAX_VALUES or self.rounds - values[0][1] >= WINDOW_ROUNDS:
            self.rounds -= values.popleft()[1]
        self._is_stale = True

    @property
    def mean(self) -> float:
        """The mean; nan without values."""
        if self._is_stale:
            ranked = sorted(self._values)
            longest = ranked[max((len(ranked) - 1) // 2, len(ranked) - 1 - len(ranked) // 8)][0]
            limit = OUTLIER_FACTOR * longest
            total = sum([min(value, limit) * weight for value, weight in ranked])
            self._mean, self._is_stale = total / self.rounds, False
        return self._mean

    @property
    def relative_variance(self) -> float:
        """Variance of the mean over its square; infinite without values."""
        return TIME_NOISE**2 / self.rounds if self._values else math.inf


@dataclass(slots=True)
class TokenCounts:
    """Tokens that rows emitted; older rows count less."""

    rows: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0

    def add(self, rows: float, tokens: float, squares: float) -> None:
        """Add `rows` that emitted `tokens` together; `squares`: the sum of their squares."""
        self.rows += rows
        self.tokens += tokens
        self.squares += squares

    def decay(self, half_lives: float) -> None:
        """Let all rows so far count less."""
        keep = 0.5**half_lives
        self.rows *= keep
        self.tokens *= keep
        self.squares *= keep

    @property
    def mean(self) -> float:
        """Tokens per row; nan without rows."""
        return self.tokens / self.rows if self.rows > 0.0 else math.nan

    @property
    def relative_variance(self) -> float:
        """Variance of the mean over its square; infinite without rows."""
        if not self.rows > 0.0:
            return math.inf
        mean = self.mean
        variance = self.squares / self.rows - mean * mean + UNSEEN_VARIANCE / self.rows
        return max(0.0, variance) / self.rows / (mean * mean)
