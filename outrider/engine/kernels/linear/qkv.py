"""Fused QKV projection: matrix product, rotary embedding, and the write of KV to the cache.

M token rows, K features, Q query heads, G key/value heads, d head dimension (even), S pool slots.
With few rows the rotation is part of the product (see `linear`): its last step still holds the
sums, so neither an extra kernel nor the attention has to read q, k and v for it.
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
    """Compute `linear.fused_linear`, then `rotary.rotary_write` of its heads.

    One step where pairs are neighbours, heads are not normed and the cache has x's dtype: then the
    float32 product is rotated and rounded once; values have the bits that `fused_linear` gives
    them. Two steps, which round the product before the rotation as well, take the rest; on CUDA
    also more than SKINNY_ROWS rows and head sizes that are no whole number of the product's tiles.

    Args:
        x: [M, K] in the weight's dtype, or a norm to be completed.
        weight_NK: [(Q + 2G) * d, K]: rows of Q = num_heads query heads, of keys, of values.
        table: float32 [M, 2, d/2], contiguous: `rotary.rotary_table` of the rows.
        write_slots: int64 [M], contiguous: pool slots; a row with -1 leaves nothing in the cache.
        keys: [G, S, d], each head contiguous.
        values: as keys.
        interleaved: see `rotary`.
        bias: [(Q + 2G) * d].
        qk_norms: [Q + G, d], and eps: see `rotary.rotary_write`.

    Returns:
        The rotated queries [M, Q, d] in x's dtype, a new tensor whose rows may be strided.

    Raises:
        InvalidRequestError: shapes, dtypes or strides do not fit.
        InternalError: see `linear.fused_linear_triton`.
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
    """Compute `rotary_qkv` in one step and one kernel; M <= SKINNY_ROWS.

    Raises:
        InvalidRequestError: more rows than the kernel takes, or heads that are no whole number of
            the config's tiles.
        InternalError: see `linear.fused_linear_triton`.
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
    """Return whether the kernel of a product of x with `config` can rotate the heads as well."""
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
    """Raise InvalidRequestError if the arguments of `rotary_qkv` do not fit together."""
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
