# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false
"""Rotary embedding of new queries and keys, and the write of KV to the cache.

Shapes: M token rows, Q query heads, G key/value heads, d head dimension (even), S slots of the KV
pool. The rotation is that of RoFormer (Su et al. 2021): a pair of elements (a, b) of a head at
position p becomes (a cos(p f) - b sin(p f), a sin(p f) + b cos(p f)), where f is the frequency of
the pair. The elements 2i and 2i + 1 form a pair if `interleaved` is set, else i and i + d/2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.errors import InvalidRequestError

_PROGRAM_ELEMENTS = 1024
"""Number of elements per program: 16 bytes for each thread of four warps, for 16-bit dtypes."""


def rotary_table(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Return the cosines and sines of position * frequency, float32 [M, 2, d/2]. Angles are
    computed in float32.

    positions: int32 [M]. inv_freq: float32 [d/2].
    """
    return (rotary_table_triton if positions.is_cuda else rotary_table_torch)(positions, inv_freq)


def rotary_table_torch(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Compute `rotary_table` with PyTorch operators."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotary_table_triton(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Compute `rotary_table` with one Triton kernel, one program per row."""
    num_rows, pairs = positions.shape[0], inv_freq.shape[0]
    table = torch.empty((num_rows, 2, pairs), dtype=torch.float32, device=positions.device)
    _table_kernel[(num_rows,)](
        positions, inv_freq, table, PAIRS=pairs, BLOCK=next_power_of_2(pairs), num_warps=1
    )
    return table


@triton.jit
def _table_kernel(positions_ptr, inv_freq_ptr, table_ptr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    position = tl.load(positions_ptr + row).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    out = table_ptr + row.to(tl.int64) * (2 * PAIRS) + pair
    tl.store(out, tl.cos(angle), mask=inside)
    tl.store(out + PAIRS, tl.sin(angle), mask=inside)


def rotary_write(
    qkv: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    interleaved: bool,
    qk_norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Apply RoPE to queries in place, and write keys with RoPE and unchanged values to the KV
    cache.

    qkv: [M, Q + 2G, d], rows of any stride: Q = num_heads query heads, then G key heads, then G
    value heads. table: `rotary_table` of the rows. write_slots: int64 [M], the slot of the KV pool
    of each row; rows with -1 are not written. keys, values: [G, S, d], the cache, each head
    contiguous. qk_norms: [Q + G, d], weights of a per-head RMSNorm with `eps` before the rotation.
    Norm and rotation are computed in float32. The normalised value is rounded to the dtype of qkv
    before and after the multiplication by its weight.

    Returns the queries, a view [M, Q, d] of qkv. The content of qkv's key heads is undefined
    afterwards. Raises InvalidRequestError if the shapes do not match.
    """
    dim, num_kv_heads = qkv.shape[2], keys.shape[0]
    if dim % 2 or qkv.shape[1] != num_heads + 2 * num_kv_heads or keys.shape[2] != dim:
        raise InvalidRequestError(
            f"qkv {tuple(qkv.shape)} does not hold {num_heads} query heads and the "
            f"key/value heads of a cache {tuple(keys.shape)}"
        )
    launch = rotary_write_triton if qkv.is_cuda else rotary_write_torch
    return launch(
        qkv,
        table,
        write_slots,
        keys,
        values,
        num_heads=num_heads,
        interleaved=interleaved,
        qk_norms=qk_norms,
        eps=eps,
    )


def rotary_write_torch(
    qkv: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    interleaved: bool,
    qk_norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute `rotary_write` with PyTorch operators."""
    num_rotated = num_heads + keys.shape[0]
    rotated = qkv[:, :num_rotated]
    if qk_norms is not None:
        normed = F.rms_norm(rotated.float(), rotated.shape[-1:], None, eps)
        rotated = normed.to(qkv.dtype) * qk_norms
    shape = (-1, 2) if interleaved else (2, rotated.shape[2] // 2)
    pairs = rotated.float().reshape(*rotated.shape[:2], *shape)
    split = -1 if interleaved else -2
    first, second = pairs.unbind(split)
    cos, sin = table[:, None].unbind(2)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=split)
    turned = turned.flatten(-2).to(qkv.dtype)
    qkv[:, :num_heads] = turned[:, :num_heads]
    there = write_slots >= 0
    for cache, fresh in ((keys, turned[:, num_heads:]), (values, qkv[:, num_rotated:])):
        cache[:, write_slots[there]] = fresh[there].transpose(0, 1).to(cache.dtype)
    return qkv[:, :num_heads]


def rotary_write_triton(
    qkv: Tensor,
    table: Tensor,
    write_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    interleaved: bool,
    qk_norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute `rotary_write` with one Triton kernel. Each program processes a few heads of one
    row."""
    num_rows, num_all, dim = qkv.shape
    pairs = next_power_of_2(dim // 2)
    block_heads = min(max(_PROGRAM_ELEMENTS // (2 * pairs), 1), next_power_of_2(num_all))
    _rotary_kernel[(cdiv(num_all, block_heads), num_rows)](
        qkv,
        table,
        write_slots,
        keys,
        values,
        qkv if qk_norms is None else qk_norms,
        qkv.stride(0),
        keys.stride(0),
        values.stride(0),
        eps,
        QUERY_HEADS=num_heads,
        KV_HEADS=keys.shape[0],
        DIM=dim,
        PAIRS=pairs,
        BLOCK_HEADS=block_heads,
        INTERLEAVED=interleaved,
        NORMED=qk_norms is not None,
        num_warps=4,
    )
    return qkv[:, :num_heads]


@triton.jit
def _rotary_kernel(
    qkv_ptr,
    table_ptr,
    write_slots_ptr,
    keys_ptr,
    values_ptr,
    norms_ptr,
    qkv_stride,
    keys_stride,
    values_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    turns = head < QUERY_HEADS + KV_HEADS
    slot = tl.load(write_slots_ptr + row)
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < DIM // 2
    cos = tl.load(table_ptr + row * DIM + pair, mask=inside, other=1.0)
    sin = tl.load(table_ptr + row * DIM + DIM // 2 + pair, mask=inside, other=0.0)
    # Without a rotation the value heads keep their bits.
    cos = tl.where(turns, cos, 1.0)
    sin = tl.where(turns, sin, 0.0)
    source = qkv_ptr + row * qkv_stride + head * DIM
    exists = head < QUERY_HEADS + 2 * KV_HEADS
    dtype = qkv_ptr.dtype.element_ty
    first, second = _load_pairs(source, exists, DIM, PAIRS, BLOCK_HEADS, INTERLEAVED)
    if NORMED:
        square = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = 1.0 / tl.sqrt_rn(square / DIM + eps)
        weights = norms_ptr + head * DIM
        a, b = _load_pairs(weights, turns, DIM, PAIRS, BLOCK_HEADS, INTERLEAVED)
        normed_a = ((first * scale).to(dtype).to(tl.float32) * a).to(dtype).to(tl.float32)
        normed_b = ((second * scale).to(dtype).to(tl.float32) * b).to(dtype).to(tl.float32)
        first = tl.where(turns, normed_a, first)
        second = tl.where(turns, normed_b, second)
    # Written as they are rounded, so that no compiler chooses.
    out_a = tl.fma(first, cos, -(second * sin))
    out_b = tl.fma(first, sin, second * cos)
    is_query = head < QUERY_HEADS
    _store_pairs(source, out_a, out_b, is_query, DIM, PAIRS, BLOCK_HEADS, INTERLEAVED)
    last = tl.where(slot >= 0, QUERY_HEADS + 2 * KV_HEADS, 0)
    key_head = (head - QUERY_HEADS).to(tl.int64)
    keys = keys_ptr + key_head * keys_stride + slot * DIM
    is_key = (head >= QUERY_HEADS) & turns & (head < last)
    _store_pairs(keys, out_a, out_b, is_key, DIM, PAIRS, BLOCK_HEADS, INTERLEAVED)
    values = values_ptr + (key_head - KV_HEADS) * values_stride + slot * DIM
    is_value = (head >= QUERY_HEADS + KV_HEADS) & (head < last)
    _store_pairs(values, out_a, out_b, is_value, DIM, PAIRS, BLOCK_HEADS, INTERLEAVED)


@triton.jit
def _load_pairs(
    head_ptrs,
    there,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return the first and the second element of every pair, each float32 [BLOCK_HEADS, PAIRS], of
    the heads at `head_ptrs` [BLOCK_HEADS, 1]."""
    if INTERLEAVED:
        # One wide load, split in registers, instead of two that each use half of what they fetch.
        feature = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(head_ptrs + feature, mask=there & (feature < DIM), other=0.0)
        both = tl.reshape(both.to(tl.float32), [BLOCK_HEADS, PAIRS, 2])
        first, second = tl.split(both)
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = there & (pair < DIM // 2)
        first = tl.load(head_ptrs + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(head_ptrs + DIM // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    head_ptrs,
    first,
    second,
    there,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    dtype = head_ptrs.dtype.element_ty
    if INTERLEAVED:
        feature = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), [BLOCK_HEADS, 2 * PAIRS])
        tl.store(head_ptrs + feature, both.to(dtype), mask=there & (feature < DIM))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = there & (pair < DIM // 2)
        tl.store(head_ptrs + pair, first.to(dtype), mask=inside)
        tl.store(head_ptrs + DIM // 2 + pair, second.to(dtype), mask=inside)
