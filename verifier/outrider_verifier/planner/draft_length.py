"""Draft length of chains that are drafted by messages: the most expected tokens per second. Pure.

Whether to draft at all is the speculation controller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider_verifier.planner.statistics import moving_average

ACCEPTANCE_HALF_LIFE_ROWS: Final = 128.0
"""Rows after which an observation of acceptance counts half."""
PRIOR_ACCEPTANCE: Final = 0.7
PRIOR_ROWS: Final = 6.0
"""Conditional acceptance of a depth that no draft has reached, and the rows that this weighs."""
MIN_SWITCH_GAIN: Final = 1.05
"""Speed of another length relative to the present one that makes it replace that."""


class AcceptanceByDepth:
    """Moving estimate of P(the draft token of depth d is accepted, given that its parent was)."""

    def __init__(self, depth: int) -> None:
        """`depth`: the longest draft, at least 1."""
        self._accepted, self._tried = [0.0] * depth, [0.0] * depth
        self._rows = 0

    def observe_row(self, depth: int, accepted: int) -> None:
        """A row verified a chain of `depth` tokens and accepted so many of them."""
        depth = min(depth, len(self._tried))
        for level in range(min(accepted + 1, depth)):
            self._tried[level] += 1.0
            self._accepted[level] += level < accepted
        self._rows += 1

    def reach(self) -> NDArray[np.float64]:
        """float64 [depth]: P(the token of depth d is accepted)."""
        accepted = np.asarray(self._accepted) + PRIOR_ROWS * PRIOR_ACCEPTANCE
        rates = accepted / (np.asarray(self._tried) + PRIOR_ROWS)
        # Depths that shortened drafts do not reach return to the prior: they are tried again.
        keep = 0.5 ** (self._rows / ACCEPTANCE_HALF_LIFE_ROWS)
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        self._rows = 0
        return np.cumprod(rates, dtype=np.float64)


class ForwardTimes:
    """Times of the target's forward at one load by draft nodes of a row, as seen in service."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe_forward(self, nodes: int, seconds: float) -> None:
        """A forward took `seconds`; a row had so many draft nodes in the mean."""
        before_s = self._seconds.get(nodes, seconds)
        self._seconds[nodes] = moving_average(before_s, seconds)

    def estimate(self, nodes: float) -> float:
        """Seconds with so many nodes of a row; nan as in `estimates`."""
        return float(self.estimates(np.asarray([nodes], dtype=np.float64))[0])

    def estimates(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [n] -> [n]: seconds by the nodes of a row, interpolated; nan where fewer than two
        numbers of nodes were seen."""
        if len(self._seconds) < 2:
            return np.full(len(lengths), np.nan)
        nodes = sorted(self._seconds)
        seconds = np.maximum.accumulate([self._seconds[each] for each in nodes])
        return np.interp(lengths, np.asarray(nodes, dtype=np.float64), seconds)


def choose_draft_length(
    reach: NDArray[np.float64],
    seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    extra_s: float,
    present: int,
) -> int:
    """The length of a chain, 1 .. len(reach), with the most expected tokens per second.

    `reach`: float64 [longest], P(the token of depth d is accepted). `seconds`: time of a forward by
    the length of its drafts, float64 [n] -> [n]; the longest draft stays where one of them is nan.
    `extra_s`: time of a round besides its forward. `present`: the length in force, which stays
    unless another one is faster by `MIN_SWITCH_GAIN`.
    """
    lengths = np.arange(1, len(reach) + 1, dtype=np.float64)
    times = seconds(lengths) + extra_s
    if not np.isfinite(times).all() or not (times > 0.0).all():
        return len(reach)
    rates = (1.0 + np.cumsum(reach)) / times
    best = int(np.argmax(rates)) + 1
    if 1 <= present <= len(reach) and rates[best - 1] < MIN_SWITCH_GAIN * rates[present - 1]:
        return present
    return best
