"""Cost table: forward times by batch shape, measured in service. Pure.

A shape is the number of sessions in a round and the draft nodes of all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

ROW_STEPS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NODE_STEPS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Nodes of one session."""
COST_EMA_WEIGHT: Final = 1.0 / 8.0
"""What a new observation weighs against the mean of the old ones."""
NUM_WARM_UP_OBSERVATIONS: Final = 4
"""Observations of a shape of which the shortest stands: a round that was held up, of a shape that
is seldom met, would stand for it for long, and for all larger ones."""


class CostTable:
    """Seconds of a forward by (sessions, nodes of all of them), on a grid of steps.

    Between steps it interpolates, outside of what was seen it takes the nearest step that was.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        """By place on the grid."""
        self._seen: dict[tuple[int, int], int] = {}
        """How often, up to FIRST."""
        self._filled: NDArray[np.float64] | None = None

    @property
    def has_data(self) -> bool:
        """Whether anything was observed."""
        return bool(self._seconds)

    def observe_forward(self, rows: int, nodes: int, seconds: float) -> None:
        """A forward of `rows` sessions (>= 1) with `nodes` draft nodes took `seconds` > 0."""
        if rows < 1 or not seconds > 0.0:
            return
        cell = _nearest(ROW_STEPS, rows), _nearest(NODE_STEPS, nodes / rows)
        before, seen = self._seconds.get(cell, seconds), self._seen.get(cell, 0)
        if seen < NUM_WARM_UP_OBSERVATIONS:
            self._seconds[cell], self._seen[cell] = min(before, seconds), seen + 1
        else:
            # One round in a thousand takes ten times as long; it says nothing about the others.
            self._seconds[cell] += COST_EMA_WEIGHT * (min(seconds, 3.0 * before) - before)
        self._filled = None

    def estimate(self, rows: int, nodes: float) -> float:
        """Seconds of such a forward; nan while unknown. Never less than a smaller one's."""
        if not self.has_data:
            return float("nan")
        return float(self.estimates(rows, np.asarray([nodes], dtype=np.float64))[0])

    def estimates(self, rows: int, nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        """`estimate` for several numbers of nodes: float64 [n] -> float64 [n]."""
        if not self.has_data:
            return np.full(len(nodes), np.nan)
        if self._filled is None:
            self._filled = _fill(self._seconds)
        per_row = nodes / max(rows, 1)
        place = float(np.interp(rows, ROW_STEPS, np.arange(len(ROW_STEPS))))
        low = int(place)
        high = min(low + 1, len(ROW_STEPS) - 1)
        below, above = (np.interp(per_row, NODE_STEPS, self._filled[row]) for row in (low, high))
        between: NDArray[np.float64] = below + (place - low) * (above - below)
        return between


def _nearest(steps: tuple[int, ...], value: float) -> int:
    above = min(bisect_left(steps, value), len(steps) - 1)
    return above - (above > 0 and value - steps[above - 1] <= steps[above] - value)


def _fill(cells: Mapping[tuple[int, int], float]) -> NDArray[np.float64]:
    """The table without gaps, not falling in either direction."""
    seconds = np.full((len(ROW_STEPS), len(NODE_STEPS)), np.nan)
    for cell, value in cells.items():
        seconds[cell] = value
    rows = np.flatnonzero(np.isfinite(seconds).any(axis=1))
    steps = np.asarray(NODE_STEPS, dtype=np.float64)
    known = np.empty((len(rows), len(steps)))
    for place, row in enumerate(rows):
        seen = np.isfinite(seconds[row])
        known[place] = np.interp(steps, steps[seen], seconds[row][seen])
    sessions = np.asarray(ROW_STEPS, dtype=np.float64)
    filled = np.stack(
        [np.interp(sessions, sessions[rows], column) for column in known.T], axis=1, dtype=float
    )
    return np.maximum.accumulate(np.maximum.accumulate(filled, axis=1), axis=0)
