"""Element types of arrays: their numbers on the wire, and how numpy holds them."""

from __future__ import annotations

import numpy as np

from outrider.wire.rounds import TensorDtype
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
