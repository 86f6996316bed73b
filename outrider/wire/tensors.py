"""Array element types on the wire and in numpy, and packing of vectors as bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.wire.arrays import TensorDtype
from outrider.wire.checks import raise_invalid
from outrider.wire.v1 import common_pb2

NUMPY_DTYPES: dict[TensorDtype, np.dtype[np.generic]] = {
    TensorDtype.FLOAT32: np.dtype("<f4"),
    TensorDtype.FLOAT16: np.dtype("<f2"),
    TensorDtype.BFLOAT16: np.dtype("<u2"),
    TensorDtype.INT32: np.dtype("<i4"),
    TensorDtype.INT64: np.dtype("<i8"),
    TensorDtype.UINT16: np.dtype("<u2"),
}
DTYPES_TO_PB: dict[TensorDtype, common_pb2.TensorDtype] = {
    TensorDtype.FLOAT32: common_pb2.TENSOR_DTYPE_FLOAT32,
    TensorDtype.FLOAT16: common_pb2.TENSOR_DTYPE_FLOAT16,
    TensorDtype.BFLOAT16: common_pb2.TENSOR_DTYPE_BFLOAT16,
    TensorDtype.INT32: common_pb2.TENSOR_DTYPE_INT32,
    TensorDtype.INT64: common_pb2.TENSOR_DTYPE_INT64,
    TensorDtype.UINT16: common_pb2.TENSOR_DTYPE_UINT16,
}
DTYPES_FROM_PB: dict[int, TensorDtype] = {
    int(value): dtype for dtype, value in DTYPES_TO_PB.items()
}
FLOAT_DTYPES = (TensorDtype.FLOAT32, TensorDtype.FLOAT16, TensorDtype.BFLOAT16)
"""Element types that features may have."""

FLOAT32 = np.dtype("<f4")
INT32 = np.dtype("<i4")
UINT8 = np.dtype("u1")
UINT16 = np.dtype("<u2")
UINT32 = np.dtype("<u4")


def pack(values: NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    """Return the elements of a vector as packed little-endian bytes of `dtype`, which must be able
    to hold the values.
    """
    return values.astype(dtype, casting="same_kind", copy=False).tobytes()


def unpack(
    data: bytes, dtype: np.dtype[np.generic], name: str, *, max_len: int
) -> NDArray[np.generic]:
    """Return the vector of `dtype` that is packed in `data`. Raises InvalidMessageError if the size
    of `data` is invalid or the vector has more than `max_len` elements. The error names the field
    `name`.
    """
    length, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise_invalid(f"{name}: {len(data)} bytes are not a multiple of {dtype.itemsize}")
    if length > max_len:
        raise_invalid(f"{name} must have at most {max_len} entries, got {length}")
    return np.frombuffer(data, dtype=dtype).copy()
