"""Features that the GPU wrote into shared memory, sent to a drafter without a copy.

n rows of a round, R rows of the memory, H feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ShmAllocator = Callable[[int, int], NDArray[np.uint8] | None]
"""A place of so many bytes in what the drafter on a link reads, or None
(`ShmChannelSet.reserve`)."""
RowSlices = list[NDArray[np.generic] | None]


@dataclass(slots=True, eq=False)
class ShmFeatures:
    """Features of n rows in shared memory; each row has its own range."""

    link_id: int
    """The drafter's that may see all of the memory."""
    memory: NDArray[np.generic]
    """[R, H] in the wire's element type, from where the place begins."""
    offsets: NDArray[np.int64]
    """[n]: the first row of each."""
    counts: NDArray[np.int64]
    """[n]; 0: it has none."""

    def select(self, chosen: NDArray[np.bool_]) -> ShmFeatures:
        """Some of the rows; chosen [n]."""
        return ShmFeatures(self.link_id, self.memory, self.offsets[chosen], self.counts[chosen])

    def row_slices(self) -> RowSlices:
        """[n] of rows [m, H]; None where there are none."""
        return [
            self.memory[offset : offset + count] if count else None
            for offset, count in zip(self.offsets.tolist(), self.counts.tolist(), strict=True)
        ]
