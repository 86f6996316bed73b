"""Fused QKV projection: matrix product, rotary embedding, and the write of KV to the cache.

Shapes: M token rows, K features, Q query heads, G key/value heads, d head dimension (even), S slots
of the KV pool. With few rows, the kernel of the product also applies the rotation while the sums
are in registers, so no other kernel has to read q, k and v for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.kernels.attention.rotary import rotary_write, rotary_write_torch
from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import (
    KERNEL_DTYPES,
    SKINNY_ROWS,
    HalfNormed,
    Normed,
    check_product,
    fused_linear,
    fused_linear_torch,
    fused_linear_triton,
    product_config,
)
from outrider.engine.kernels.linear.launch import RotaryOut
from outrider.errors import InvalidRequestError


def rotary_qkv(
    x: Normed,
    weight_NK: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    interleaved: bool,
    bias: Tensor | None = None,
    qk_norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute the QKV projection of x, apply RoPE, and write keys and values to the KV cache. This
    is `fused_linear` followed by `rotary_write`.

    Both are one step if `interleaved` is set, there are no `qk_norms` and the cache has the dtype
    of x. The float32 product is then rotated and rounded once; the values have the same bits as
    with `fused_linear`. In all other cases there are two steps, and the product is also rounded
    before the rotation. On CUDA there are also two steps with more than SKINNY_ROWS rows, or if the
    head dimension is not a multiple of the tile width of the product.

    Args:
        x: [M, K] in the weight's dtype, or the first half of an RMSNorm.
        weight_NK: [(Q + 2G) * d, K]: rows of Q = num_heads query heads, of G key heads, of G value
            heads.
        table: float32 [M, 2, d/2], contiguous: `rotary.rotary_table` of the rows.
        write_slots: int64 [M], contiguous: slot of the KV pool of each row; -1 for rows that are
            not written.
        keys: [G, S, d]: key cache, each head contiguous.
        values: [G, S, d]: value cache, each head contiguous.
        interleaved: which elements of a head form a pair, see `rotary`.
        bias: [(Q + 2G) * d].
        qk_norms: [Q + G, d]: weights of a per-head RMSNorm, see `rotary.rotary_write`.
        eps: epsilon of this RMSNorm.

    Returns:
        The queries with RoPE applied, [M, Q, d] in x's dtype: a new tensor whose rows may be
        strided.

    Raises:
        InvalidRequestError: shapes, dtypes or strides do not match.
        InternalError: see `fused.fused_linear_triton`.
    """
    plain = x.scaled if isinstance(x, HalfNormed) else x
    check_heads_product(plain, weight_NK, bias, table, write_slots, keys, values, num_heads)
    if interleaved and qk_norms is None and plain.dtype == keys.dtype == values.dtype:
        if not plain.is_cuda and isinstance(x, Tensor):
            return rotary_qkv_torch(
                x, weight_NK, table, write_slots, keys, values, num_heads=num_heads, bias=bias
            )
        if fits_rotation(plain, keys, product_config(plain, weight_NK)):
            return rotary_qkv_triton(
                x, weight_NK, table, write_slots, keys, values, num_heads=num_heads, bias=bias
            )
    qkv = fused_linear(x, weight_NK, bias=bias)
    return rotary_write(
        qkv.view(qkv.shape[0], num_heads + 2 * keys.shape[0], keys.shape[2]),
        table,
        write_slots,
        keys,
        values,
        num_heads=num_heads,
        interleaved=interleaved,
        qk_norms=qk_norms,
        eps=eps,
    )


def rotary_qkv_torch(
    x: Tensor,
    weight_NK: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `rotary_qkv` by PyTorch operators in one step."""
    wide = torch.promote_types(x.dtype, torch.float32)
    qkv = fused_linear_torch(x, weight_NK, bias=bias, out_dtype=wide)
    query = rotary_write_torch(
        qkv.view(qkv.shape[0], num_heads + 2 * keys.shape[0], keys.shape[2]),
        table,
        write_slots,
        keys,
        values,
        num_heads=num_heads,
        interleaved=True,
    )
    return query.to(x.dtype)


def rotary_qkv_triton(
    x: Normed,
    weight_NK: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    bias: Tensor | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """Compute `rotary_qkv` in one step, with one Triton kernel.

    Raises:
        InvalidRequestError: there are more than SKINNY_ROWS rows, or the head dimension is not a
            multiple of config.block_n.
        InternalError: see `fused.fused_linear_triton`.
    """
    plain = x.scaled if isinstance(x, HalfNormed) else x
    config = config or product_config(plain, weight_NK)
    dim = keys.shape[2]
    if dim % config.block_n:
        raise InvalidRequestError(f"heads of {dim} in tiles of {config.block_n} columns")
    rotary = RotaryOut(table, write_slots, keys, values, num_heads)
    query = fused_linear_triton(x, weight_NK, bias=bias, config=config, rotary=rotary)
    return query.view(query.shape[0], num_heads, dim)


def fits_rotation(x: Tensor, keys: Tensor, config: LinearConfig) -> bool:
    """Return whether `rotary_qkv_triton` supports x, the head dimension of `keys` and `config`."""
    return (
        x.shape[0] <= SKINNY_ROWS
        and x.dtype in KERNEL_DTYPES
        and keys.shape[2] % config.block_n == 0
    )


def check_heads_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> None:
    """Raise InvalidRequestError if shapes, dtypes or strides of the arguments of `rotary_qkv` do
    not match."""
    check_product(x, weight, bias, None, gated=False)
    num_rows = x.shape[0]
    if keys.ndim != 3 or keys.shape != values.shape or keys.shape[2] % 2:
        raise InvalidRequestError(
            f"keys and values must be [G, S, d] with an even d, got {list(keys.shape)} and "
            f"{list(values.shape)}"
        )
    num_kv_heads, _, dim = keys.shape
    if any(cache.stride()[1:] != (dim, 1) for cache in (keys, values)):
        raise InvalidRequestError("each head of keys and values must be contiguous")
    if weight.shape[0] != (num_heads + 2 * num_kv_heads) * dim:
        raise InvalidRequestError(
            f"{weight.shape[0]} weight rows are not {num_heads} query heads and the key/value "
            f"heads of a cache {list(keys.shape)}"
        )
    for name, tensor, shape, dtype in (
        ("table", table, (num_rows, 2, dim // 2), torch.float32),
        ("write_slots", write_slots, (num_rows,), torch.int64),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise InvalidRequestError(
                f"{name} must be {dtype} {list(shape)} and contiguous, got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
