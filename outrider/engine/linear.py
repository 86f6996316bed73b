"""Linear layers over weights prepacked by oneDNN, or plain where this CPU cannot pack them.

On a CPU the time of a matrix product with few rows is the time of reading the weights, but a plain
product with 2 to 64 rows takes several times that. oneDNN's prepacked layout keeps 4 to 8 rows at
the price of one. With two or more rows, the result of a row does not depend on the number of rows.
For a single row, `matmul_tuning` chooses a padded packed product or a plain product by the weight's
shape and the kind of processor. The plain product sums in another order, so that its result differs
in the last bits, as attention does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.matmul_tuning import (
    SingleRowMethod,
    choose_single,
    record_choice,
    this_processor,
)
from outrider.errors import FailedPreconditionError

MIN_ROWS: Final = 4
"""Number of rows to which a smaller packed product is padded where padding is faster."""
BLOCK_ROWS: Final = 16
"""Rows of each product of a `BlockedLinear`. In bfloat16 a product of 16 rows takes as long as one
of 4, and one of 32 a third longer."""
_PACK_ROWS_HINT: Final = 16
_KEPT_PRODUCTS: Final = 256
"""Maximum number of compiled products in each of the caches of oneDNN and torch. oneDNN compiles a
product of 0.5 to 1 MB for every number of rows, so that the default of 1,024 takes too much memory.
Both limits are read at the first product."""


class Linear(Protocol):
    """Protocol of a linear layer, y = x @ weight.T + bias."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Apply the layer to x [N, in] and return [N, out]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)` as a new tensor [N, out]. residual is [N, out]."""
        ...


class PlainLinear:
    """Linear layer by `F.linear` over the unpacked weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        """Unpacked weight [out, in], which fused kernels read directly."""
        self.bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """Apply the layer to x [..., in] and return [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)` as a new tensor."""
        # In place, because a separate sum costs a tenth of a single-row product on a CPU.
        return F.linear(x, self.weight, self.bias).add_(residual)


class PackedLinear:
    """Linear layer over a packed weight, with a plain copy if single rows use it."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        single: SingleRowMethod = SingleRowMethod.PADDED,
    ) -> None:
        ops: Any = torch.ops.mkldnn
        with torch.inference_mode():
            self._packed: Tensor = ops._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
        self._bias = bias
        self._out_features = weight.shape[0]
        self._unary: Callable[..., Tensor] = ops._linear_pointwise.default
        self._binary: Callable[..., Tensor] = ops._linear_pointwise.binary
        self._alone = PlainLinear(weight, bias) if single is SingleRowMethod.PLAIN else None
        self.min_rows = MIN_ROWS if single is SingleRowMethod.PADDED else 1
        """Number of rows to which smaller inputs are padded; 1 if inputs are not padded."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Apply the layer to x [..., in] and return [..., out]."""
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._out_features)
        rows = x.shape[0]
        if rows == 1 and self._alone is not None:
            return self._alone(x)
        if rows >= self.min_rows:
            return self._unary(x, self._packed, self._bias, "none", [], "")
        if rows == 0:
            return x.new_empty((0, self._out_features))
        return self(F.pad(x, (0, 0, 0, self.min_rows - rows)))[:rows]

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)` as a new tensor, with a fused sum if x is not padded."""
        if x.dim() == 2:
            if x.shape[0] == 1 and self._alone is not None:
                return self._alone.add(x, residual)
            if x.shape[0] >= self.min_rows:
                return self._binary(x, residual, self._packed, self._bias, "add")
        return residual + self(x)


class BlockedLinear:
    """Linear layer over a packed weight that multiplies exactly BLOCK_ROWS rows at a time, so that
    the bits of a row do not depend on the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._block = PackedLinear(weight, bias)
        self.min_rows = BLOCK_ROWS
        """Number of rows to which smaller inputs are padded."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Apply the layer to x [N, in] and return [N, out]."""
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % BLOCK_ROWS))
        blocks = [self._block(block) for block in torch.split(padded, BLOCK_ROWS)]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:rows]

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)` as a new tensor."""
        return residual + self(x)


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    packed: bool = True,
    keep_plain: bool = True,
    batch_invariant: bool = False,
) -> Linear:
    """Return a linear layer over `weight` [out, in], packed if possible on this machine.

    A packed layer holds the weight in the layout of oneDNN's matrix products. It also keeps
    `weight` as it is if `keep_plain` is set and products of one input row are faster with it on
    this kind of processor. `batch_invariant`: the bits of a row of a packed layer do not depend on
    the number of rows. In float32 padding single rows is enough for this; in bfloat16 oneDNN sums
    in another order for 33 rows and more on some processors.
    """
    if not (packed and can_pack(weight.dtype, weight.device)):
        return PlainLinear(weight, bias)
    if batch_invariant and weight.dtype != torch.float32:
        return BlockedLinear(weight, bias)
    shape = (weight.shape[0], weight.shape[1])
    single = SingleRowMethod.PADDED
    if not batch_invariant:
        single = choose_single(shape, weight.dtype, this_processor(), keep_plain=keep_plain)
    record_choice(shape, weight.dtype, single)
    return PackedLinear(weight, bias, single=single)


def min_rows(linears: Iterable[Linear]) -> int:
    """Return the number of rows to which a batch must be padded so that no layer pads: MIN_ROWS if
    all layers would pad, otherwise 1."""
    return min((getattr(linear, "min_rows", 1) for linear in linears), default=1)


def plain_weights(linear: object) -> PlainLinear:
    """Return the layer if its weights are not packed for oneDNN. Raises FailedPreconditionError
    otherwise."""
    if not isinstance(linear, PlainLinear):
        raise FailedPreconditionError(
            "the device engine needs plain weights: load the model with packed=False",
            reason="PACKED_WEIGHTS",
        )
    return linear


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN can pack weights of this dtype on this device (a supported CPU)."""
    return device.type == "cpu" and _cpu_packs(dtype)


@functools.cache
def _cpu_packs(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(_KEPT_PRODUCTS))
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
