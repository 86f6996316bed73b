"""Statistics of measured rounds: typical times without outliers, tokens per row, and load. Pure.

The load is the base-2 logarithm of the number of running sessions, rounded, with hysteresis. Times
are seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from outrider_verifier.state.round_plan import TIME_EMA_WEIGHT

WINDOW_ROUNDS: Final = 32
"""Number of rounds over which `RoundMean` computes the mean. A small number is enough, because the
times of rounds vary little."""
MAX_VALUES: Final = 256
"""Maximum number of values that `RoundMean` stores. It is larger than `WINDOW_ROUNDS`, because a
round with only some of the sessions counts as less than one round."""
OUTLIER_FACTOR: Final = 3.0
"""Limit for the time of one round, as a multiple of the longest usual round: longer times are
clipped to it. Usual rounds are all rounds of the window except the longest eighth. A short stall of
the host therefore hardly changes the mean."""
TIME_NOISE: Final = 0.15
"""Assumed relative standard deviation of the time of one round."""
UNSEEN_VARIANCE: Final = 2.0
"""Term that, divided by the number of rows, is added to the measured variance of a row's token
count. It prevents a variance near 0 if there are few rows, which may have equal counts by
chance."""


def moving_average(before_s: float, seconds: float) -> float:
    """Return the exponential moving average `before_s` after adding the value `seconds`, which is
    first limited to `OUTLIER_FACTOR` * `before_s`."""
    return before_s + TIME_EMA_WEIGHT * (min(seconds, OUTLIER_FACTOR * before_s) - before_s)


@dataclass(slots=True)
class RoundMean:
    """Weighted mean of the positive values of the last `WINDOW_ROUNDS` rounds. Outliers are
    clipped, see `OUTLIER_FACTOR`."""

    rounds: float = 0.0
    """Sum of the weights of the stored values."""
    _values: deque[tuple[float, float]] = field(default_factory=deque)
    """Pairs (value, weight), oldest first."""
    _mean: float = math.nan
    _is_stale: bool = False

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add the value of a round. `weight` is 1, or less for a less reliable value."""
        values = self._values
        values.append((value, weight))
        self.rounds += weight
        while len(values) > MAX_VALUES or self.rounds - values[0][1] >= WINDOW_ROUNDS:
            self.rounds -= values.popleft()[1]
        self._is_stale = True

    @property
    def mean(self) -> float:
        """Weighted mean; nan without values."""
        if self._is_stale:
            ranked = sorted(self._values)
            longest = ranked[max((len(ranked) - 1) // 2, len(ranked) - 1 - len(ranked) // 8)][0]
            limit = OUTLIER_FACTOR * longest
            total = sum([min(value, limit) * weight for value, weight in ranked])
            self._mean, self._is_stale = total / self.rounds, False
        return self._mean

    @property
    def relative_variance(self) -> float:
        """Variance of the mean, divided by the square of the mean; infinite without values."""
        return TIME_NOISE**2 / self.rounds if self._values else math.inf


@dataclass(slots=True)
class TokenCounts:
    """Sums over the token counts of rows. The weight of older rows decreases."""

    rows: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0

    def add(self, rows: float, tokens: float, squares: float) -> None:
        """Add `rows` rows that emitted `tokens` tokens in total. `squares` is the sum of the
        squared token counts of the rows."""
        self.rows += rows
        self.tokens += tokens
        self.squares += squares

    def decay(self, half_lives: float) -> None:
        """Multiply the weight of all rows so far by 0.5 ** `half_lives`."""
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
        """Variance of the mean, divided by the square of the mean; infinite without rows."""
        if not self.rows > 0.0:
            return math.inf
        mean = self.mean
        variance = self.squares / self.rows - mean * mean + UNSEEN_VARIANCE / self.rows
        return max(0.0, variance) / self.rows / (mean * mean)


STEADY_DOUBLINGS: Final = 0.6
"""Maximum difference between log2 of the number of sessions and the load at which the load
stays."""
LOWER_LOAD_ROUNDS: Final = 16
"""Number of rounds with fewer sessions after which the load is reduced. It is not reduced sooner,
because sessions that end are often replaced soon."""
IMMEDIATE_DOUBLINGS: Final = 1.5
"""Decrease of log2 of the number of sessions from which the load is reduced immediately."""
MAX_PREFILL_SHARE: Final = 0.9
"""Maximum share of a round's time that may be attributed to prompts."""


class RoundCostModel(Protocol):
    """Returns the device time, in seconds, of a round with `rows` decoding sessions and `chunks`
    prefill chunks; None if it was not measured. `own` is whether the sessions have in-process
    drafts."""

    def __call__(self, rows: int, *, own: bool, chunks: int = 0) -> float | None: ...


class RoundSample(NamedTuple):
    """Measurements of a finished round."""

    rows: int
    """Number of sessions that decoded in the round."""
    nodes: int
    """Total number of draft nodes that the round verified, including in-process drafts."""
    prompt_tokens: int
    chunks: int
    """Number of prefill chunks of the round."""
    seconds: float
    has_in_process_drafts: bool = False


class LoadStats:
    """Present load, and typical times of rounds at each load."""

    def __init__(self, times: RoundCostModel) -> None:
        self._times = times
        self.load = 0
        """Present load: base-2 logarithm of the number of sessions, rounded, with hysteresis."""
        self.sessions = 1
        """Number of running sessions, at least 1."""
        self.prompts_s = 0.0
        """Total time, in seconds, that prompts have added to all rounds so far."""
        self._rounds = 0
        self._changed_at = 0
        """Number of the round in which the load last changed."""
        self._fewer_since: int | None = None
        """Number of the round since which the number of sessions has been too low for the load;
        None if it is not too low."""
        self._plain_s: dict[int, float] = {}
        """Moving average of the time of a plain round, in seconds, by load."""
        self._drafted_s = 0.0
        """Moving average of the time of a drafted round, in seconds."""

    def begin_round(self, sessions: int) -> bool:
        """Set the number of running sessions, and return whether the load has changed."""
        self.sessions = max(1, sessions)
        above = math.log2(self.sessions) - self.load
        if above >= -STEADY_DOUBLINGS:
            self._fewer_since = None
        if abs(above) <= STEADY_DOUBLINGS or not (above > 0.0 or self._is_lasting(above)):
            return False
        self._set_load()
        return True

    def reset_after_idle(self, sessions: int) -> None:
        """Set the load from the number of sessions without hysteresis. Called after a time without
        rounds."""
        self.sessions = max(1, sessions)
        self._set_load()
        self._changed_at = self._rounds - LOWER_LOAD_ROUNDS - self.sessions

    @property
    def is_steady(self) -> bool:
        """Whether the load has been constant for some rounds. The required number grows with the
        number of sessions, because each session needs rounds of its own to adopt a new draft
        shape."""
        return self._rounds - self._changed_at >= LOWER_LOAD_ROUNDS + self.sessions

    @property
    def round_s(self) -> float:
        """Typical time of a plain round at the present load, or else at the nearest measured load,
        in seconds. If no plain round was measured, it is the time of a drafted round; before any
        round it is 0."""
        if not self._plain_s:
            return self._drafted_s
        near = min(self._plain_s, key=lambda load: abs(load - self.load))
        return self._plain_s[near]

    def observe_round(self, sample: RoundSample) -> float:
        """Record a round, and return its time, in seconds, without the part that prompts caused.
        This part is the difference between the device times with and without prefill chunks. If
        these are unknown, it is proportional to the prompts' share of the computed tokens."""
        added_s = min(self._added_s(sample), MAX_PREFILL_SHARE * sample.seconds)
        self.prompts_s += added_s
        self._rounds += 1
        seconds = sample.seconds - added_s
        if sample.rows and not sample.nodes:
            before_s = self._plain_s.get(self.load, seconds)
            self._plain_s[self.load] = moving_average(before_s, seconds)
        elif sample.rows:
            self._drafted_s = moving_average(self._drafted_s or seconds, seconds)
        return seconds

    def _added_s(self, sample: RoundSample) -> float:
        if not sample.chunks:
            return 0.0
        # A round with prompts only is compared with a round in which all sessions decode, since
        # sessions may have waited for the round for lack of drafts.
        rows, own = sample.rows or self.sessions, sample.has_in_process_drafts
        with_s = self._times(rows, own=own, chunks=sample.chunks)
        without_s = self._times(rows, own=own)
        if with_s and without_s:
            return max(0.0, with_s - without_s)
        prompts = sample.prompt_tokens
        return sample.seconds * prompts / (prompts + rows + sample.nodes)

    def _set_load(self) -> None:
        self.load, self._fewer_since = round(math.log2(self.sessions)), None
        self._changed_at = self._rounds

    def _is_lasting(self, above: float) -> bool:
        """Return whether the number of sessions has fallen enough, or for long enough, to reduce
        the load. `above` is log2 of the number of sessions minus the load, which is negative."""
        if self._fewer_since is None:
            self._fewer_since = self._rounds
        lasting = self._rounds - self._fewer_since >= LOWER_LOAD_ROUNDS
        return above <= -IMMEDIATE_DOUBLINGS or lasting
