"""Statistics of measured rounds: typical times without outliers, tokens per row, and load. Pure.

Load is the number of running sessions as a power of two, with hysteresis. Times are seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from outrider_verifier.state.round_plan import TIME_EMA_WEIGHT

WINDOW_ROUNDS: Final = 32
"""Number of rounds in the window of the mean; it can be short because the times of rounds vary
little."""
MAX_VALUES: Final = 256
"""Maximum number of stored values; more than the window, because rounds with few of the sessions
count less."""
OUTLIER_FACTOR: Final = 3.0
"""Maximum that the time of one round counts as, relative to the longest usual round. Usual rounds
are all but the longest eighth of the window. So a short stall of the host does not change the
mean."""
TIME_NOISE: Final = 0.15
"""Assumed standard deviation of one round's time, as a share of it."""
UNSEEN_VARIANCE: Final = 2.0
"""Variance of a row's token count that is assumed in addition while there are few rows."""


def moving_average(before_s: float, seconds: float) -> float:
    """Return the moving average `before_s` updated by `seconds`, which is clipped to
    `OUTLIER_FACTOR` times the average."""
    return before_s + TIME_EMA_WEIGHT * (min(seconds, OUTLIER_FACTOR * before_s) - before_s)


@dataclass(slots=True)
class RoundMean:
    """Weighted mean of positive values of the last `WINDOW_ROUNDS` rounds, outliers clipped."""

    rounds: float = 0.0
    """Sum of the weights."""
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
    """Numbers of tokens that rows emitted; older rows count less."""

    rows: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0

    def add(self, rows: float, tokens: float, squares: float) -> None:
        """Add `rows` rows that emitted `tokens` tokens in all. `squares` is the sum of the squares
        of the rows' token counts."""
        self.rows += rows
        self.tokens += tokens
        self.squares += squares

    def decay(self, half_lives: float) -> None:
        """Reduce the weight of all rows so far by `half_lives` half-lives."""
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
"""Doublings by which the number of sessions may differ from the load without changing it."""
LOWER_LOAD_ROUNDS: Final = 16
"""Number of rounds with fewer sessions after which the load falls, since sessions that end are
often followed by new ones soon."""
IMMEDIATE_DOUBLINGS: Final = 1.5
"""Decrease in doublings from which the load falls at once."""
MAX_PREFILL_SHARE: Final = 0.9
"""Maximum share of a round's time that is attributed to prompts."""


class RoundCostModel(Protocol):
    """Returns the device's time, in seconds, of a round with `rows` decoding sessions and `chunks`
    prefill chunks; None if it was not measured. `own` is whether the sessions have in-process
    drafts."""

    def __call__(self, rows: int, *, own: bool, chunks: int = 0) -> float | None: ...


class RoundSample(NamedTuple):
    """Measurements of a finished round."""

    rows: int
    """Number of sessions that decoded in the round."""
    nodes: int
    """Number of draft nodes that the round verified, including in-process drafts."""
    prompt_tokens: int
    chunks: int
    """Number of prefill chunks of the round."""
    seconds: float
    has_in_process_drafts: bool = False


class LoadStats:
    """The present load, and typical times of rounds."""

    def __init__(self, times: RoundCostModel) -> None:
        self._times = times
        self.load = 0
        """Present load: base-2 logarithm of the number of sessions, rounded and with hysteresis."""
        self.sessions = 1
        """Number of running sessions, at least 1."""
        self.prompts_s = 0.0
        """Total time, in seconds, that prompts have added to rounds so far."""
        self._rounds = 0
        self._changed_at = 0
        """Number of the round in which the load changed last."""
        self._fewer_since: int | None = None
        """Number of the round from which there were too few sessions for the load; None if there
        are enough."""
        self._plain_s: dict[int, float] = {}
        """Mean time of a plain round in seconds, by load."""
        self._drafted_s = 0.0
        """Mean time of a drafted round in seconds."""

    def begin_round(self, sessions: int) -> bool:
        """Set the number of running sessions. Return whether the load has changed."""
        self.sessions = max(1, sessions)
        above = math.log2(self.sessions) - self.load
        if above >= -STEADY_DOUBLINGS:
            self._fewer_since = None
        if abs(above) <= STEADY_DOUBLINGS or not (above > 0.0 or self._is_lasting(above)):
            return False
        self._set_load()
        return True

    def reset_after_idle(self, sessions: int) -> None:
        """Set the load from the number of sessions at once, after a time without rounds."""
        self.sessions = max(1, sessions)
        self._set_load()
        self._changed_at = self._rounds - LOWER_LOAD_ROUNDS - self.sessions

    @property
    def is_steady(self) -> bool:
        """Whether the load has been constant for some rounds. With more sessions more rounds are
        needed, because all sessions have to follow a change of the draft shape."""
        return self._rounds - self._changed_at >= LOWER_LOAD_ROUNDS + self.sessions

    @property
    def round_s(self) -> float:
        """Time of a plain round at the present or the nearest measured load, in seconds. It is that
        of a drafted round if no plain round was measured, and 0 before any round."""
        if not self._plain_s:
            return self._drafted_s
        near = min(self._plain_s, key=lambda load: abs(load - self.load))
        return self._plain_s[near]

    def observe_round(self, sample: RoundSample) -> float:
        """Record a round. Return its time, in seconds, without the part that prompts caused. That
        part is the difference of the device's times with and without prefill chunks; if these are
        unknown, it is proportional to the prompt tokens."""
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
        """Return whether there have been fewer sessions for long enough. `above` is the (negative)
        difference from the load in doublings."""
        if self._fewer_since is None:
            self._fewer_since = self._rounds
        lasting = self._rounds - self._fewer_since >= LOWER_LOAD_ROUNDS
        return above <= -IMMEDIATE_DOUBLINGS or lasting
