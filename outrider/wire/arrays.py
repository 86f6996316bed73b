"""Arrays of messages: dense arrays, and the feature vectors of tokens as rows.

In shapes, F is the number of rows and H the number of values in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class TensorDtype(StrEnum):
    """Element types that arrays of messages may have."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"
    UINT16 = "uint16"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WireTensor:
    """A dense array with its wire dtype; bfloat16 data is held as uint16 bit patterns."""

    dtype: TensorDtype
    data: NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureRows:
    """Feature vectors of a round, [F, H]: F rows of H values. They are held in segments, which are
    joined only when they are encoded.
    """

    dtype: TensorDtype
    segments: tuple[NDArray[np.generic], ...]
    """Segments of consecutive rows, [m, H] each; there is at least one."""

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return int(self.segments[0].shape[1])

    @property
    def count(self) -> int:
        """Number of rows in all segments."""
        return sum(len(piece) for piece in self.segments)

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes."""
        return sum(piece.nbytes for piece in self.segments)

    def joined(self) -> NDArray[np.generic]:
        """Return all rows as one array [F, H]. It is not a copy if there is only one segment."""
        return self.segments[0] if len(self.segments) == 1 else np.concatenate(self.segments)
