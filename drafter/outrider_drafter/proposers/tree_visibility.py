"""Attention masks among draft rows of trees that are run level by level."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_drafter.proposers.tree_growth import StepFrontier


class TreeVisibility:
    """Visibility among the draft rows of each slot: a row sees its ancestors and itself."""

    def __init__(self) -> None:
        self._last: dict[int, NDArray[np.bool_]] = {}
        """[rows of the slot's last step, all its draft rows]."""
        self._branched: set[int] = set()

    def add_rows(self, slot: int, frontier: StepFrontier) -> NDArray[np.bool_] | None:
        """What the new rows see of all draft rows, the new ones last: [rows, D], or None for all.

        None as long as every step had one row: a chain needs no mask.
        """
        rows = len(frontier.tokens)
        above = self._last.get(slot)
        inherited = np.ones((rows, 0), np.bool_) if above is None else above[list(frontier.parents)]
        visible = np.concatenate((inherited, np.eye(rows, dtype=np.bool_)), axis=1)
        self._last[slot] = visible
        if rows > 1:
            self._branched.add(slot)
        return visible if slot in self._branched else None
