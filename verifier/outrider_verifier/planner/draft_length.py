"""Chooses the draft length of chains that drafters propose by messages. Pure.

The chosen length has the most expected tokens per second. Whether sessions draft at all is decided
by `SpeculationController`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider_verifier.planner.statistics import moving_average

ACCEPTANCE_HALF_LIFE_ROWS: Final = 128.0
"""Number of rows after which the weight of an older observation of acceptance is halved."""
PRIOR_ACCEPTANCE: Final = 0.7
PRIOR_ROWS: Final = 6.0
"""Weight of the prior acceptance rate `PRIOR_ACCEPTANCE`, as a number of rows."""
MIN_SWITCH_GAIN: Final = 1.05
"""Minimum speed of another draft length, relative to the present one, that is needed to change the
length."""


class AcceptanceByDepth:
    """Moving estimate of the acceptance rate at each depth d: the probability that the draft token
    of depth d is accepted, given that its parent was accepted."""

    def __init__(self, depth: int) -> None:
        """Create an estimate without observations. `depth` is the maximum draft length, at least
        1."""
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
        """Return, for each depth d, the probability that the draft tokens of depths 1 to d are all
        accepted, float64 [depth]. Each call also reduces the weight of older observations."""
        accepted = np.asarray(self._accepted) + PRIOR_ROWS * PRIOR_ACCEPTANCE
        rates = accepted / (np.asarray(self._tried) + PRIOR_ROWS)
        # Depths that shortened drafts do not reach return to the prior: they are tried again.
        keep = 0.5 ** (self._rows / ACCEPTANCE_HALF_LIFE_ROWS)
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        self._rows = 0
        return np.cumprod(rates, dtype=np.float64)


class ForwardTimes:
    """Measured times of the target's forward pass at one load, as a function of the number of draft
    nodes per row."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe_forward(self, nodes: int, seconds: float) -> None:
        """Record that a forward pass with a mean of `nodes` draft nodes per row took `seconds`."""
        before_s = self._seconds.get(nodes, seconds)
        self._seconds[nodes] = moving_average(before_s, seconds)

    def estimate(self, nodes: float) -> float:
        """Return the estimated time, in seconds, of a forward pass with `nodes` draft nodes per
        row; nan if fewer than two numbers of nodes were measured."""
        return float(self.estimates(np.asarray([nodes], dtype=np.float64))[0])

    def estimates(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the estimated times, in seconds, of forward passes with these numbers of draft
        nodes per row, float64 [n] -> [n]. They are interpolated between measurements; all are nan
        if fewer than two numbers of nodes were measured."""
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

    `reach` is float64 [maximum length]: the probability that the draft token of each depth is
    accepted. `seconds` maps draft lengths to the times of a forward pass, float64 [n] -> [n]; if a
    time is nan, the maximum length is returned. `extra_s` is the time of a round without its
    forward pass. `present` is the present length; it is returned unless another length is faster by
    a factor of `MIN_SWITCH_GAIN`.
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
