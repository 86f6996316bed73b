"""Batch-invariant matrix products: the result of a row does not depend on other rows.

Shapes: M rows of x, N rows of the weight, K features, C output columns, Q query heads, d head
dimension.

A product sums its K features in ascending order in one float32 accumulator. Hopper's matrix unit
then gives the same bits for every tile size and instruction. Two implementations can therefore be
used interchangeably: the weight-streaming kernel without split K, and cuBLAS if its algorithm does
not split K. Whether it does is checked once for each shape, by comparing the results of both. The
product is rounded to the dtype of x before an activation, a rotation or a residual, because cuBLAS
does so when it adds a matrix. Norms between products are separate kernels.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import Tensor

from outrider.engine.kernels.attention.rotary import rotary_write
from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import (
    KERNEL_DTYPES,
    SKINNY_ROWS,
    check_product,
    fused_linear_torch,
    fused_linear_triton,
    fused_linear_wide,
    product_config,
)
from outrider.engine.kernels.linear.launch import RotaryOut
from outrider.engine.kernels.linear.qkv import check_heads_product, fits_rotation
from outrider.engine.kernels.norm import rms_norm

logger = logging.getLogger(__name__)

# (N, K, gated, block_m): (block_n, block_k, num_warps, num_stages, swap)
_TABLE: Final[dict[tuple[int, int, bool, int], tuple[int, int, int, int, bool]]] = {
    (4096, 4096, False, 16): (64, 128, 4, 8, True),
    (4096, 4096, False, 32): (64, 128, 4, 8, True),
    (4096, 4096, False, 64): (32, 256, 4, 4, False),
    (4096, 14336, False, 32): (64, 128, 4, 8, True),
    (4096, 14336, False, 64): (32, 256, 4, 4, False),
}
"""Fastest configurations without split K on an H200, for shapes whose entry in `configs.TABLE`
splits K."""
_equal: dict[tuple[object, ...], bool] = {}
"""Whether cuBLAS gives the same bits as the weight-streaming kernel, for each shape and dtype."""


def forbid_split_k() -> None:
    """Forbid cuBLAS algorithms that split K in this process, as far as torch has a setting for it.

    Without this call, `invariant_linear` gives the same results but is slower for shapes whose K
    cuBLAS would split.
    """
    # Only cuBLASLt can leave these algorithms out.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    for name in ("bf16", "fp16"):
        setattr(matmul, f"allow_{name}_reduced_precision_reduction", (False, False))


def invariant_config(x: Tensor, weight: Tensor, *, gated: bool = False) -> LinearConfig:
    """Return the launch configuration of x [M, K] @ weight [N, K]^T. It never splits K."""
    config = product_config(x, weight, gated=gated)
    entry = _TABLE.get((weight.shape[0], weight.shape[1], gated, config.block_m))
    if entry is not None and x.element_size() == 2:
        block_n, block_k, num_warps, num_stages, swap = entry
        return LinearConfig(config.block_m, block_n, block_k, 1, num_warps, num_stages, swap)
    return config._replace(split_k=1)


def invariant_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    overwrite: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute activation(x @ weight^T + bias) + residual. Arguments and errors are those of
    `fused_linear`.

    On CUDA the first call for each shape with more than SKINNY_ROWS rows compares cuBLAS with the
    weight-streaming kernel, which takes about a millisecond. During graph capture it uses the
    kernel without comparing.
    """
    check_product(x_MK, weight_NK, bias, residual, gated)
    dtype = x_MK.dtype if out_dtype is None else out_dtype
    if not x_MK.is_cuda or x_MK.dtype not in KERNEL_DTYPES:
        result = fused_linear_torch(
            x_MK, weight_NK, bias=bias, residual=residual, gated=gated, out_dtype=dtype
        )
    elif x_MK.shape[0] > SKINNY_ROWS and _cublas_is_equal(
        x_MK, weight_NK, bias, residual, gated=gated, dtype=dtype
    ):
        result = fused_linear_wide(
            x_MK,
            weight_NK,
            bias=bias,
            residual=residual,
            gated=gated,
            out_dtype=dtype,
            overwrite=overwrite,
        )
    else:
        return invariant_linear_triton(
            x_MK, weight_NK, bias=bias, residual=residual, gated=gated, out_dtype=dtype, out=out
        )
    return result if out is None or result.data_ptr() == out.data_ptr() else out.copy_(result)


def invariant_linear_triton(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    rotary: RotaryOut | None = None,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `invariant_linear` with the weight-streaming kernel, for any number of rows."""
    return fused_linear_triton(
        x_MK,
        weight_NK,
        bias=bias,
        residual=residual,
        gated=gated,
        out_dtype=out_dtype,
        config=config or invariant_config(x_MK, weight_NK, gated=gated),
        rotary=rotary,
        rounded=True,
        out=out,
    )


def invariant_add_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    residual_MN: Tensor,
    *,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    overwrite: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x @ weight^T + bias + residual, [M, N], and the RMSNorm of this result with the weight
    `norm_weight` [N]."""
    result = invariant_linear(
        x_MK, weight_NK, bias=bias, residual=residual_MN, overwrite=overwrite, out=out
    )
    return result, rms_norm(result, norm_weight, eps)


def invariant_qkv(
    x: Tensor,
    weight_NK: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    bias: Tensor | None = None,
    qk_norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute the QKV projection of x, apply RoPE, and write keys and values to the KV cache.

    Arguments, result and errors are those of `qkv.rotary_qkv`. The product is rounded to the dtype
    of x before the rotation. One kernel does all of this for few rows; for many rows the rotation
    is a second kernel.
    """
    check_heads_product(x, weight_NK, bias, table, write_slots, keys, values, num_heads)
    config = invariant_config(x, weight_NK)
    is_plain = qk_norms is None and x.dtype == keys.dtype == values.dtype
    if x.is_cuda and is_plain and fits_rotation(x, keys, config):
        rotary = RotaryOut(table, write_slots, keys, values, num_heads)
        query = invariant_linear_triton(x, weight_NK, bias=bias, rotary=rotary, config=config)
        return query.view(query.shape[0], num_heads, keys.shape[2])
    qkv = invariant_linear(x, weight_NK, bias=bias)
    return rotary_write(
        qkv.view(qkv.shape[0], num_heads + 2 * keys.shape[0], keys.shape[2]),
        table,
        write_slots,
        keys,
        values,
        num_heads=num_heads,
        interleaved=True,
        qk_norms=qk_norms,
        eps=eps,
    )


def _cublas_is_equal(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    gated: bool,
    dtype: torch.dtype,
) -> bool:
    """Return whether `fused_linear_wide` gives the same bits as the weight-streaming kernel; False
    if this is not known during graph capture."""
    key = (
        *(x.shape[0], *weight.shape, x.dtype, dtype, weight.device),
        *(bias is not None, residual is not None, gated),
    )
    known = _equal.get(key)
    if known is not None:
        return known
    if torch.cuda.is_current_stream_capturing():
        return False
    generator = torch.Generator(x.device).manual_seed(len(_equal))
    sample = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
    wide, streamed = (
        run(sample, weight, bias=bias, residual=residual, gated=gated, out_dtype=dtype)
        for run in (fused_linear_wide, invariant_linear_triton)
    )
    _equal[key] = torch.equal(wide, streamed)
    logger.debug("matrix product compared", extra={"shape": str(key[:3]), "is_cublas": _equal[key]})
    return _equal[key]
