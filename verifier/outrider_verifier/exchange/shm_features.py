"""Features that the GPU wrote into shared memory, sent to a drafter without a copy.

In shapes, n is the number of decoding sessions of a round, R the number of feature rows in the
memory, and H the feature width.
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
    """Features of the n decoding sessions of a round, in shared memory. The feature rows of a
    session are consecutive."""

    link_id: int
    """Link of the drafter that may read all of `memory`."""
    memory: NDArray[np.generic]
    """[R, H] features in the element type of the wire format, from the start of the reservation."""
    offsets: NDArray[np.int64]
    """[n] index in `memory` of the first feature row of each session."""
    counts: NDArray[np.int64]
    """[n] number of feature rows of each session, 0 if there are none."""

    def select(self, chosen: NDArray[np.bool_]) -> ShmFeatures:
        """Return the features of the sessions for which the mask `chosen` [n] is true."""
        return ShmFeatures(self.link_id, self.memory, self.offsets[chosen], self.counts[chosen])

    def row_slices(self) -> RowSlices:
        """Return the features of each session as a list of n arrays [count, H], with None for
        sessions without features."""
        return [
            self.memory[offset : offset + count] if count else None
            for offset, count in zip(self.offsets.tolist(), self.counts.tolist(), strict=True)
        ]
