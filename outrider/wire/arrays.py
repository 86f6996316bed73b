"""Dense arrays and feature rows of messages; F rows of features, H values each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class TensorDtype(StrEnum):
    """Element types that may cross the wire."""

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
    """Features of a round, [F, H] in pieces: they are joined where they become bytes."""

    dtype: TensorDtype
    segments: tuple[NDArray[np.generic], ...]
    """[m, H] each, at least one."""

    @property
    def width(self) -> int:
        """Values a row."""
        return int(self.segments[0].shape[1])

    @property
    def count(self) -> int:
        """Rows of all pieces."""
        return sum(len(piece) for piece in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(piece.nbytes for piece in self.segments)

    def joined(self) -> NDArray[np.generic]:
        """All rows [F, H]; a view if they are one piece."""
        return self.segments[0] if len(self.segments) == 1 else np.concatenate(self.segments)
