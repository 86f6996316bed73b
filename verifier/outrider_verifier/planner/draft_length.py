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
"""Prior acceptance rate of a depth that no draft has reached, and the number of rows that the prior
counts as."""
MIN_SWITCH_GAIN: Final = 1.05
"""Minimum speed of another draft length, relative to the present one, for a change of the
length."""


class AcceptanceByDepth:
    """Moving estimate of P(the draft token of depth d is accepted, given that its parent was)."""

    def __init__(self, depth: int) -> None:
        """Create an estimate without observations. `depth` is the length of the longest draft, at
        least 1."""
        self._accepted, self._tried = [0.0] * depth, [0.0] * depth
        self._rows = 0

    def observe_row(self, depth: int, accepted: int) -> None:
        """Record that a row verified a chain of `depth` draft tokens and accepted the first
        `accepted` of them."""
        depth = min(depth, len(self._tried))
        for level in range(min(accepted + 1, depth)):
            self._tried[level] += 1.0
            self._accepted[level] += level < accepted
        self._rows += 1

    def reach(self) -> NDArray[np.float64]:
        """Return, for each depth d, the probability that the draft token of depth d is accepted:
        float64 [depth]. Each call also decays older observations."""
        accepted = np.asarray(self._accepted) + PRIOR_ROWS * PRIOR_ACCEPTANCE
        rates = accepted / (np.asarray(self._tried) + PRIOR_ROWS)
        # Depths that shortened drafts do not reach return to the prior: they are tried again.
        keep = 0.5 ** (self._rows / ACCEPTANCE_HALF_LIFE_ROWS)
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        self._rows = 0
        return np.cumprod(rates, dtype=np.float64)


class ForwardTimes:
    """Measured times of the target's forward pass at one load, by draft nodes per row."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe_forward(self, nodes: int, seconds: float) -> None:
        """Record that a forward pass with `nodes` draft nodes per row, on average, took
        `seconds`."""
        before_s = self._seconds.get(nodes, seconds)
        self._seconds[nodes] = moving_average(before_s, seconds)

    def estimate(self, nodes: float) -> float:
        """Return the estimated seconds of a forward pass with `nodes` draft nodes per row; nan as
        in `estimates`."""
        return float(self.estimates(np.asarray([nodes], dtype=np.float64))[0])

    def estimates(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the estimated seconds of forward passes by draft nodes per row, interpolated:
        float64 [n] -> [n]. All are nan if fewer than two numbers of nodes were measured."""
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
    """Return the chain length, from 1 to len(reach), with the most expected tokens per second.

    `reach` is float64 [longest]: the probability that the token of each depth is accepted.
    `seconds` maps draft lengths to the times of a forward pass, float64 [n] -> [n]; if a time is
    nan, the longest length is returned. `extra_s` is the time of a round besides its forward pass.
    `present` is the length in force, which stays unless another one is faster by `MIN_SWITCH_GAIN`.
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
