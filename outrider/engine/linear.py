"""Linear layers over weights packed for oneDNN, or over plain weights if this CPU cannot pack them.

On a CPU a matrix product with one row takes as long as reading the weights. A product of a plain
weight with 2 to 64 rows takes several times as long. With a packed weight, 4 to 8 rows take as long
as one row. With two or more rows, the result of a row does not depend on the number of rows.

For a single row, `matmul_tuning` chooses a packed product with padding or a plain product, by the
weight's shape and the kind of processor. A plain product adds in another order than a packed one,
so that their results can differ in the last bits. The same is true of attention.
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
"""Number of rows to which smaller inputs of a packed product are padded, if that is faster."""
BLOCK_ROWS: Final = 16
"""Number of rows of each product of a `BlockedLinear`. In bfloat16, 16 rows take as long as 4 rows,
and 32 rows take a third longer."""
_PACK_ROWS_HINT: Final = 16
_KEPT_PRODUCTS: Final = 256
"""Maximum number of compiled products that oneDNN and torch cache, each in its own cache. oneDNN
compiles a product of 0.5 to 1 MB for every number of rows, so that the default of 1,024 takes too
much memory. Both limits are read at the first product."""


class Linear(Protocol):
    """Protocol of a linear layer, y = x @ weight.T + bias."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Apply the layer to x [N, in] and return [N, out]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)` as a new tensor [N, out]. residual is [N, out]."""
        ...


class PlainLinear:
    """Linear layer that applies `F.linear` to a plain (unpacked) weight."""

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
    """Linear layer over a weight packed for oneDNN. It keeps a plain copy as well if single rows
    use it."""

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
        """Return `residual + self(x)` as a new tensor. The sum is part of the product unless x is
        padded."""
        if x.dim() == 2:
            if x.shape[0] == 1 and self._alone is not None:
                return self._alone.add(x, residual)
            if x.shape[0] >= self.min_rows:
                return self._binary(x, residual, self._packed, self._bias, "add")
        return residual + self(x)


class BlockedLinear:
    """Linear layer over a packed weight that multiplies exactly BLOCK_ROWS rows at a time.

    The result of a row therefore does not depend, to the bit, on the number of rows.
    """

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
    """Return a linear layer over `weight` [out, in], packed if this machine supports it.

    A packed layer holds the weight in the layout of oneDNN's matrix products. With `keep_plain` it
    also keeps `weight` as it is if products of one input row are faster with it on this kind of
    processor. With `batch_invariant` a packed layer gives a row the same bits for any number of
    rows. In float32 padding single rows is enough for this. In bfloat16, where oneDNN on some
    processors sums in another order from 33 rows on, the layer multiplies blocks of rows
    (`BlockedLinear`).
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
    """Return the smallest `min_rows` of the layers. A layer without this attribute counts as 1.

    A model pads its batches to this number once, so that each layer need not pad them.
    """
    return min((getattr(linear, "min_rows", 1) for linear in linears), default=1)


def plain_weights(linear: object) -> PlainLinear:
    """Return `linear` as a `PlainLinear`. Raises FailedPreconditionError if its weights are packed
    for oneDNN."""
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
