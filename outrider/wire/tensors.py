"""Arrays as bytes: dense tensors with a dtype tag, and packed little-endian vectors.

Decoded arrays are owned and writable copies, so that torch can wrap them without a warning.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.wire.checks import fail
from outrider.wire.limits import MAX_MESSAGE_BYTES, MAX_TENSOR_RANK
from outrider.wire.messages import TensorDtype, WireTensor
from outrider.wire.v1 import common_pb2

_NUMPY: dict[TensorDtype, np.dtype[np.generic]] = {
    TensorDtype.FLOAT32: np.dtype("<f4"),
    TensorDtype.FLOAT16: np.dtype("<f2"),
    TensorDtype.BFLOAT16: np.dtype("<u2"),
    TensorDtype.INT32: np.dtype("<i4"),
    TensorDtype.INT64: np.dtype("<i8"),
    TensorDtype.UINT16: np.dtype("<u2"),
}
_TO_PB: dict[TensorDtype, common_pb2.TensorDtype] = {
    TensorDtype.FLOAT32: common_pb2.TENSOR_DTYPE_FLOAT32,
    TensorDtype.FLOAT16: common_pb2.TENSOR_DTYPE_FLOAT16,
    TensorDtype.BFLOAT16: common_pb2.TENSOR_DTYPE_BFLOAT16,
    TensorDtype.INT32: common_pb2.TENSOR_DTYPE_INT32,
    TensorDtype.INT64: common_pb2.TENSOR_DTYPE_INT64,
    TensorDtype.UINT16: common_pb2.TENSOR_DTYPE_UINT16,
}
_FROM_PB: dict[int, TensorDtype] = {int(value): dtype for dtype, value in _TO_PB.items()}

INT32 = np.dtype("<i4")
UINT8 = np.dtype("u1")
UINT16 = np.dtype("<u2")
UINT32 = np.dtype("<u4")
FLOAT32 = np.dtype("<f4")


def tensor_to_pb(tensor: WireTensor) -> common_pb2.Tensor:
    """Encode a tensor; its array must have the numpy dtype of its tag."""
    expected = _NUMPY[tensor.dtype]
    if tensor.data.dtype != expected:
        raise TypeError(f"{tensor.dtype} must be held as {expected}, got {tensor.data.dtype}")
    return common_pb2.Tensor(
        dtype=_TO_PB[tensor.dtype], shape=tensor.data.shape, data=tensor.data.tobytes()
    )


def tensor_from_pb(pb: common_pb2.Tensor) -> WireTensor:
    """Decode a tensor; InvalidMessageError unless dtype, shape and size agree."""
    dtype, data = _FROM_PB.get(pb.dtype), pb.data  # reading a bytes field copies it
    if dtype is None:
        fail(f"tensor dtype {pb.dtype} is unknown")
    shape = tuple(pb.shape)
    if len(shape) > MAX_TENSOR_RANK:
        fail(f"a tensor has at most {MAX_TENSOR_RANK} dimensions, got {len(shape)}")
    expected = math.prod(shape) * _NUMPY[dtype].itemsize
    if expected > MAX_MESSAGE_BYTES or expected != len(data):
        fail(f"a {dtype} tensor of shape {shape} has {expected} bytes, got {len(data)}")
    return WireTensor(
        dtype=dtype, data=np.frombuffer(data, dtype=_NUMPY[dtype]).reshape(shape).copy()
    )


def pack(values: NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    """A vector as packed little-endian elements of `dtype`; values must fit it."""
    return values.astype(dtype, casting="same_kind", copy=False).tobytes()


def unpack(
    data: bytes, dtype: np.dtype[np.generic], name: str, *, max_len: int
) -> NDArray[np.generic]:
    """The vector packed in `data`; InvalidMessageError if its size is wrong or beyond max_len."""
    length, rest = divmod(len(data), dtype.itemsize)
    if rest:
        fail(f"{name}: {len(data)} bytes are not a multiple of {dtype.itemsize}")
    if length > max_len:
        fail(f"{name} must have at most {max_len} entries, got {length}")
    return np.frombuffer(data, dtype=dtype).copy()
