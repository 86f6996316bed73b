"""Linear layers over weights packed for the CPU.

On a CPU the time of a matrix product with few rows is the time of reading the weights, but a plain
product with 2 to 64 rows takes several times that. oneDNN's prepacked layout keeps 4 to 8 rows at
the price of one. It also computes every row alike whatever the number of rows, as long as there
are at least two: speculative and plain decoding then see the same products, bit for bit. Fewer
than MIN_ROWS rows are padded, which was measured to be faster than oneDNN's own single-row path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import FailedPreconditionError

MIN_ROWS: Final = 4
"""Packed products of fewer rows are padded to this many."""
_PACK_ROWS_HINT: Final = 16


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[N, in] -> [N, out]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)` as a new tensor; residual is [N, out]."""
        ...


class PlainLinear:
    """`F.linear` over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        """[out, in], for kernels that fuse more than the product."""
        self.bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`."""
        return residual + F.linear(x, self.weight, self.bias)


class PackedLinear:
    """Holds only the packed copy of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        ops: Any = torch.ops.mkldnn
        with torch.inference_mode():
            self._packed: Tensor = ops._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
        self._bias = bias
        self._out_features = weight.shape[0]
        self._unary: Callable[..., Tensor] = ops._linear_pointwise.default
        self._binary: Callable[..., Tensor] = ops._linear_pointwise.binary

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._out_features)
        rows = x.shape[0]
        if rows >= MIN_ROWS:
            return self._unary(x, self._packed, self._bias, "none", [], "")
        if rows == 0:
            return x.new_empty((0, self._out_features))
        return self(F.pad(x, (0, 0, 0, MIN_ROWS - rows)))[:rows]

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`, in one call when there are enough rows."""
        if x.dim() == 2 and x.shape[0] >= MIN_ROWS:
            return self._binary(x, residual, self._packed, self._bias, "add")
        return residual + self(x)


def make_linear(weight: Tensor, bias: Tensor | None = None, *, packed: bool = True) -> Linear:
    """A linear layer over `weight` [out, in]: packed where this machine can, else plain.

    The packed layer keeps no reference to `weight`.
    """
    if packed and can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def plain_weights(linear: object) -> PlainLinear:
    """The layer as plain weights. Raises FailedPreconditionError for packed ones."""
    if not isinstance(linear, PlainLinear):
        raise FailedPreconditionError(
            "the device engine needs plain weights: load the model with packed=False",
            reason="PACKED_WEIGHTS",
        )
    return linear


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type here (a CPU with the needed instructions)."""
    return device.type == "cpu" and _cpu_packs(dtype)


@functools.cache
def _cpu_packs(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.arange(32.0).reshape(4, 8).to(dtype)
        layer, ones = PackedLinear(weight), torch.ones(MIN_ROWS, 8, dtype=dtype)
        with torch.inference_mode():
            result = layer.add(ones, layer(ones))
            return torch.equal(result, 2 * F.linear(ones, weight))
    except (RuntimeError, AttributeError):
        # The operators are not part of torch's stable interface: a build may lack them.
        return False
