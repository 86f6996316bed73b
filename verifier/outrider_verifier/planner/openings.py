"""What it takes the host to open a session (pure).

With good drafts sessions follow one another faster, so that more of them begin in a round. What
each costs, however it decodes, must not be held against drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.speculation.measurements import STALL_FACTOR

PRIOR_OPEN_S: Final = 150e-6
"""What is believed at first: of 129 us of the engine thread and 62 of the event loop some is done
while a device works (`bench host --own 3 --routers 4 --sessions 256 --answers 90`, a Xeon)."""
MAX_OPEN_S: Final = 1e-3
PRIOR_WEIGHT: Final = 64.0
"""How firmly that is believed: openings squared, off their mean."""
HALF_LIFE_ROUNDS: Final = 256.0
"""Rounds after which one counts half."""
_KEEP: Final = 0.5 ** (1.0 / HALF_LIFE_ROUNDS)
STALL_S: Final = 1e-3
"""So much beyond `STALL_FACTOR` times what is expected was no opening."""


@dataclass(slots=True)
class _Regression:
    """Rounds of one kind: a line through them has a start of its own."""

    openings: float = 0.0
    seconds: float = 0.0
    """Means."""
    both: float = 0.0
    square: float = 0.0
    """Sums, off these."""
    count: float = 0.0

    def add_sample(self, openings: int, seconds: float, each_s: float) -> None:
        if self.count:
            expected_s = max(0.0, self.seconds + each_s * (openings - self.openings))
            seconds = min(seconds, STALL_FACTOR * expected_s + STALL_S)
        self.count = _KEEP * self.count + 1.0
        off = openings - self.openings
        self.openings += off / self.count
        self.seconds += (seconds - self.seconds) / self.count
        # One factor off the mean as it was, one off the mean as it is (Welford 1962).
        self.both = _KEEP * self.both + off * (seconds - self.seconds)
        self.square = _KEEP * self.square + off * (openings - self.openings)


@dataclass(slots=True)
class SessionOpenCost:
    """Learnt from rounds in which more and fewer sessions began: the slope of least squares."""

    _in_process: _Regression = field(default_factory=_Regression)
    _plain: _Regression = field(default_factory=_Regression)
    each_s: float = PRIOR_OPEN_S
    """Of each session."""

    def observe_round(self, openings: int, beyond_s: float, *, own: bool) -> None:
        """A round in which so many sessions began took `beyond_s` longer than its device's share;
        `own`: it verified drafts of this process's head."""
        line = self._in_process if own else self._plain
        line.add_sample(openings, beyond_s, self.each_s)
        both = self._in_process.both + self._plain.both + PRIOR_WEIGHT * PRIOR_OPEN_S
        square = self._in_process.square + self._plain.square + PRIOR_WEIGHT
        self.each_s = min(max(0.0, both / square), MAX_OPEN_S)
