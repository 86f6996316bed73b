"""Features that the GPU wrote into shared memory, sent to a drafter without a copy.

In shapes, n is the number of rows of a round, R that of the memory, and H the feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ShmAllocator = Callable[[int, int], NDArray[np.uint8] | None]
"""Reserves shared memory that a drafter reads, or returns None: see `ShmChannelSet.reserve`."""
RowSlices = list[NDArray[np.generic] | None]


@dataclass(slots=True, eq=False)
class ShmFeatures:
    """Features of n rows in shared memory; each row has its own range."""

    link_id: int
    """Link of the drafter that may read all of `memory`."""
    memory: NDArray[np.generic]
    """[R, H] features in the element type of the wire format, from the start of the reservation."""
    offsets: NDArray[np.int64]
    """[n] index in `memory` of the first feature row of each row."""
    counts: NDArray[np.int64]
    """[n] number of feature rows of each row, 0 if there are none."""

    def select(self, chosen: NDArray[np.bool_]) -> ShmFeatures:
        """Return the features of the rows for which the mask `chosen` [n] is true."""
        return ShmFeatures(self.link_id, self.memory, self.offsets[chosen], self.counts[chosen])

    def row_slices(self) -> RowSlices:
        """Return a list of n arrays [count, H], with None for rows without features."""
        return [
            self.memory[offset : offset + count] if count else None
            for offset, count in zip(self.offsets.tolist(), self.counts.tolist(), strict=True)
        ]
