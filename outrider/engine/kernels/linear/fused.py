"""Fused matrix products: preceding RMSNorm, following activation or residual.

M rows of x, N rows of the weight, K features. With few rows a product takes the time of reading the
weight once; `fused_linear` then runs as one kernel that streams the weight through the SMs at that
speed and applies the fused operations. With more rows cuBLAS is faster, between small kernels.

A norm between two products is split around them (`HalfNormed`): the first one multiplies by the
norm's weight and sums squares, the second one divides. This needs no extra kernel, and no program
of the second product repeats it; with more rows than SPLIT_NORM_ROWS it is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.linear.configs import LinearConfig, choose_config
from outrider.engine.kernels.linear.launch import NormIn, NormOut, RotaryOut, launch_skinny
from outrider.engine.kernels.norm import rms_norm, silu_mul
from outrider.engine.kernels.runtime import cdiv
from outrider.errors import InvalidRequestError

SKINNY_ROWS: Final = 64
"""Products of up to this many rows stream the weight in one kernel; more rows go to cuBLAS."""
SPLIT_NORM_ROWS: Final = 32
"""Norms of up to this many rows are split around their products. With more, each program of the
second product adds up so many squares that a kernel for the norm costs less (decision 0010)."""
KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the operands that the kernel multiplies."""


class HalfNormed(NamedTuple):
    """A RMSNorm that `fused_linear` completes; made for at most SPLIT_NORM_ROWS rows."""

    scaled: Tensor
    """[M, K]: x * weight, rounded to x's dtype."""
    squares: Tensor
    """float32 [P, M]: sums of x^2 over P parts of each row."""
    eps: float


Normed = Tensor | HalfNormed
"""The normed input of a product: whole, or half done."""


def splits_norms(num_rows: int, like: Tensor) -> bool:
    """Return whether norms of `num_rows` rows of `like`'s kind are split around their products."""
    # x * weight before the division would leave float16's range.
    return (
        like.is_cuda
        and num_rows <= SPLIT_NORM_ROWS
        and like.dtype in (torch.float32, torch.bfloat16)
    )


def add_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    residual_MN: Tensor,
    *,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    overwrite: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Normed]:
    """Compute `fused_linear` with a residual, and the RMSNorm of its result for the next product.

    norm_weight [N]; the other arguments as there.
    """
    if splits_norms(x_MK.shape[0], x_MK):
        check_product(x_MK, weight_NK, bias, residual_MN, gated=False)
        return add_linear_triton(
            x_MK, weight_NK, residual_MN, norm_weight=norm_weight, eps=eps, bias=bias, out=out
        )
    result = fused_linear(
        x_MK, weight_NK, bias=bias, residual=residual_MN, overwrite=overwrite, out=out
    )
    return result, rms_norm(result, norm_weight, eps)


def add_linear_triton(
    x_MK: Tensor,
    weight_NK: Tensor,
    residual_MN: Tensor,
    *,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, HalfNormed]:
    """Compute `add_linear` in one kernel; the norm is half done."""
    config = config or product_config(x_MK, weight_NK)
    num_rows, columns = residual_MN.shape
    tiles = cdiv(columns, config.block_n)
    normed = HalfNormed(
        scaled=torch.empty_like(residual_MN, memory_format=torch.contiguous_format),
        squares=torch.empty((tiles, num_rows), dtype=torch.float32, device=x_MK.device),
        eps=eps,
    )
    result = fused_linear_triton(
        x_MK,
        weight_NK,
        bias=bias,
        residual=residual_MN,
        config=config,
        norm_out=NormOut(norm_weight, normed.scaled, normed.squares),
        out=out,
    )
    return result, normed


def fused_linear(
    x_MK: Normed,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    overwrite: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute activation(rms_norm(x) @ weight^T + bias) + residual.

    The normed x is rounded to x's dtype, the rest once at the end where it is one kernel.

    Args:
        x_MK: [M, K] in the weight's dtype, or a norm to be completed.
        weight_NK: [N, K], contiguous along K.
        bias: [N].
        norm_weight: [K]; None: x is not normalised (here).
        eps: of the RMSNorm (see `norm.rms_norm`).
        residual: [M, N], or [M, N/2] with `gated`.
        gated: rows 0..N/2 of the weight are gate, the others up; the result is silu(gate) * up.
        out_dtype: of the result; None: x's.
        overwrite: the residual's memory may be taken for the result, which saves a copy.
        out: contiguous memory for the result, of its shape and dtype; None: the result's own.

    Returns:
        [M, N], or [M, N/2] with `gated`; a new tensor unless `overwrite` or `out`.

    Raises:
        InvalidRequestError: shapes or dtypes do not fit.

    On CUDA the workspace of a device is made by its first product, which must not be under graph
    capture, and serves one stream at a time: products that run side by side would share it.
    """
    if isinstance(x_MK, HalfNormed):
        check_product(x_MK.scaled, weight_NK, bias, residual, gated)
        return fused_linear_triton(
            x_MK, weight_NK, bias=bias, residual=residual, gated=gated, out_dtype=out_dtype, out=out
        )
    check_product(x_MK, weight_NK, bias, residual, gated)
    if norm_weight is not None:
        x_MK = rms_norm(x_MK, norm_weight, eps)
    run: Callable[..., Tensor]
    if not x_MK.is_cuda or x_MK.dtype not in KERNEL_DTYPES:
        run = fused_linear_torch
    elif x_MK.shape[0] <= SKINNY_ROWS:
        run = partial(fused_linear_triton, out=out)
    else:
        run = partial(fused_linear_wide, overwrite=overwrite)
    result = run(x_MK, weight_NK, bias=bias, residual=residual, gated=gated, out_dtype=out_dtype)
    if out is None or result.data_ptr() == out.data_ptr():
        return result
    return out.copy_(result)


def fused_linear_torch(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `fused_linear` without the norm by torch operators, in float32 (float64 stays)."""
    wide = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    result = F.linear(x_MK.to(wide), weight_NK.to(wide), None if bias is None else bias.to(wide))
    if gated:
        gate, up = result.chunk(2, dim=1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual
    return result.to(x_MK.dtype if out_dtype is None else out_dtype)


def fused_linear_wide(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Compute `fused_linear` without the norm for many rows: cuBLAS product, activation.

    Rounds to x's dtype between the steps. The residual is added within the product where there is
    no bias, activation or other dtype between them; only there does `overwrite` take its memory.
    """
    dtype = x_MK.dtype if out_dtype is None else out_dtype
    plain = bias is None and not gated
    if plain and residual is not None and residual.dtype == dtype == x_MK.dtype:
        if overwrite:
            return residual.addmm_(x_MK, weight_NK.t())
        return torch.addmm(residual, x_MK, weight_NK.t())
    if plain and residual is None and x_MK.is_cuda and dtype == torch.float32 != x_MK.dtype:
        return torch.mm(x_MK, weight_NK.t(), out_dtype=dtype)
    result = F.linear(x_MK, weight_NK, bias)
    if gated:
        result = silu_mul(result)
    if residual is not None:
        result = result + residual
    return result.to(dtype)


def fused_linear_triton(
    x_MK: Normed,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
    norm_out: NormOut | None = None,
    rotary: RotaryOut | None = None,
    rounded: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `fused_linear` by the weight-streaming kernel; M <= SKINNY_ROWS unless `rounded`.

    The order of every sum is fixed by `config` (None: `choose_config`), so results repeat.
    norm_out: where the first half of a norm of the result goes. rotary: rotate and keep the result
    by heads; returns the query heads [M, Q * d]. rounded: round the product before what follows it,
    as `fused_linear_wide` does; rows of several tiles are allowed then.

    Raises:
        InvalidRequestError: more rows than SKINNY_ROWS or than the config's tile.
        InternalError: the device's workspace would be made under graph capture, or is too small
            for `config`, or `rotary` comes with what follows other products.
    """
    x = x_MK.scaled if isinstance(x_MK, HalfNormed) else x_MK
    config = config or product_config(x, weight_NK, gated=gated)
    num_rows, columns = x.shape[0], weight_NK.shape[0]
    if not rounded and num_rows > min(config.block_m, SKINNY_ROWS):
        raise InvalidRequestError(f"{num_rows} rows for a kernel of {config.block_m}")
    if gated:
        columns //= 2
    if rotary is not None:
        columns = rotary.num_heads * rotary.keys.shape[2]
    dtype = x.dtype if out_dtype is None else out_dtype
    if out is None:
        out = torch.empty((num_rows, columns), dtype=dtype, device=x.device)
    if num_rows == 0 or weight_NK.shape[0] == 0:
        return out
    launch_skinny(
        config,
        x if x.stride(1) == 1 else x.contiguous(),
        weight_NK,
        out,
        bias=bias,
        residual=residual if residual is None or residual.stride(1) == 1 else residual.contiguous(),
        gated=gated,
        norm_in=NormIn(x_MK.squares, x_MK.eps) if isinstance(x_MK, HalfNormed) else None,
        norm_out=norm_out,
        rotary=rotary,
        rounded=rounded,
    )
    return out


def product_config(x: Tensor, weight: Tensor, *, gated: bool = False) -> LinearConfig:
    """Return `choose_config` for x [M, K] and a weight [N, K]."""
    n, k = weight.shape
    return choose_config(x.shape[0], n, k, gated, x.device, x.element_size())


def check_product(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> None:
    """Raise InvalidRequestError where shapes or dtypes of a product do not fit."""
    if x_MK.ndim != 2 or weight_NK.ndim != 2 or x_MK.shape[1] != weight_NK.shape[1]:
        raise InvalidRequestError(
            f"fused_linear takes x [M, K] and a weight [N, K], got {list(x_MK.shape)} and "
            f"{list(weight_NK.shape)}"
        )
    n = weight_NK.shape[0]
    if x_MK.dtype != weight_NK.dtype:
        raise InvalidRequestError(f"x is {x_MK.dtype}, the weight {weight_NK.dtype}: must agree")
    if weight_NK.stride(1) != 1 and weight_NK.shape[1] > 1:
        raise InvalidRequestError("the weight must be contiguous along its input features")
    if gated and n % 2:
        raise InvalidRequestError(f"a gated weight has an even number of rows, got {n}")
    columns = n // 2 if gated else n
    for name, tensor, shape in (
        ("bias", bias, (n,)),
        ("residual", residual, (x_MK.shape[0], columns)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise InvalidRequestError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
