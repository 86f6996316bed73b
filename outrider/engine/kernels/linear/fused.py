"""Matrix products fused with a preceding RMSNorm and a following activation or residual.

Shapes: M rows of x, N rows of the weight, K features. With few rows, a product takes as long as
reading the weight once. `fused_linear` then runs one Triton kernel that streams the weight through
the SMs and applies the fused operations. With more rows, it runs cuBLAS and separate kernels for
the other operations, because that is faster.

An RMSNorm between two products of up to SPLIT_NORM_ROWS rows is split into two halves
(`HalfNormed`): the first product multiplies its result by the norm's weight and sums the squares,
the second product divides by the root of their mean. This needs no extra kernel. With more rows,
the norm is a kernel of its own.
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
"""Maximum number of rows of x for the weight-streaming kernel. Products with more rows use
cuBLAS."""
SPLIT_NORM_ROWS: Final = 32
"""Maximum number of rows of a norm that is split between two products (see `HalfNormed`). With more
rows, each program of the second product would sum so many squares that a separate kernel for the
norm is faster (decision 0010)."""
KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Operand dtypes that the weight-streaming kernel supports."""


class HalfNormed(NamedTuple):
    """First half of the RMSNorm of x: all but the division by the root mean square, which
    `fused_linear` applies to its product. Used for at most SPLIT_NORM_ROWS rows."""

    scaled: Tensor
    """[M, K]: x multiplied by the norm's weight, rounded to the dtype of x."""
    squares: Tensor
    """float32 [P, M]: sums of x^2 over each of P parts of a row."""
    eps: float


Normed = Tensor | HalfNormed
"""Input of a matrix product after RMSNorm: the complete result, or its first half."""


def splits_norms(num_rows: int, like: Tensor) -> bool:
    """Return whether the norm of a tensor with `num_rows` rows, on the device and with the dtype of
    `like`, is split between two products (see `HalfNormed`)."""
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
    """Return x @ weight^T + bias + residual, [M, N], and the RMSNorm of this result as the input of
    the next product.

    norm_weight: [N]. The other arguments are those of `fused_linear`.
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
    """Compute `add_linear` with one Triton kernel. The second result is the first half of the
    norm."""
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

    The normalised x is rounded to the dtype of x. If one kernel computes the rest, only its result
    is rounded.

    Args:
        x_MK: [M, K] in the weight's dtype, or the first half of an RMSNorm.
        weight_NK: [N, K], contiguous along K.
        bias: [N].
        norm_weight: [K], weight of the RMSNorm; None for no RMSNorm.
        eps: epsilon of the RMSNorm (see `norm.rms_norm`).
        residual: [M, N], or [M, N/2] with `gated`.
        gated: the first N/2 weight rows give the gate, the others `up`; the activation is
            silu(gate) * up. Without it there is no activation.
        out_dtype: dtype of the result; None for that of x.
        overwrite: the result may be written into the memory of the residual, which saves a copy.
        out: contiguous memory for the result, of its shape and dtype; None for a new tensor.

    Returns:
        [M, N], or [M, N/2] with `gated`; a new tensor unless `overwrite` or `out` is set.

    Raises:
        InvalidRequestError: shapes or dtypes do not match.

    On CUDA the first product on a device allocates a workspace, so it must not run during graph
    capture. All products of a device share the workspace, so they must run on one stream.
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
    """Compute `fused_linear` without the norm, with PyTorch operators in float32, or in float64 if
    x is float64."""
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
    """Compute `fused_linear` without the norm for many rows, with a cuBLAS product and separate
    kernels.

    The result of each step is rounded to the dtype of x. cuBLAS adds the residual within the
    product if there is no bias and no activation and all dtypes are equal. Only then does
    `overwrite` have an effect.
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
    """Compute `fused_linear` with the weight-streaming kernel.

    config: launch configuration, None for that of `choose_config`. It fixes the order of all sums,
    so that results are reproducible. norm_out: receives the first half of the RMSNorm of the
    result. rotary: apply RoPE to the result and write its keys and values to the KV cache; the
    function then returns the query heads [M, Q * d]. rounded: round the product to the dtype of x
    before an activation, a rotation or a residual, as `fused_linear_wide` does. Only then may x
    have more than SKINNY_ROWS rows.

    Raises:
        InvalidRequestError: there are more rows than SKINNY_ROWS or than the config's tile, without
            `rounded`.
        InternalError: the device's workspace does not exist during graph capture or is too small
            for `config`, or `rotary` is combined with a residual, an activation or a norm.
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
    """Raise InvalidRequestError if the shapes or dtypes of the operands of `fused_linear` do not
    match."""
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
