# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Compaction after acceptance: the KV and the features of accepted nodes become contiguous.

Shapes: B sessions of the batch bucket, N nodes per session, L layers, G key/value heads, S KV slots
of the pool, d head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.attention.layout import pool_slots
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.errors import InvalidRequestError

_GATHER_BLOCK = 2048
"""Maximum number of elements of a row that one program of `gather_rows` copies."""


def compact_kv(
    storage: Tensor,
    rows: Tensor,
    counts: Tensor,
    context: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    block_tokens: int,
) -> None:
    """Make the KV of accepted nodes contiguous, in place: for each session b and each j <
    counts[b], copy the KV at position context[b] + rows[b, j] to position context[b] + j.

    storage: [2, L, G, S, d], keys, then values. rows: int32 [B, N], the accepted nodes, ascending,
    so that rows[b, j] >= j. counts: int32 [B], the number of accepted nodes. context: int32 [B],
    the number of positions before the nodes. tables: int32 [X, T], the KV block numbers of X
    sessions. slots: int32 [B], the row of `tables` of each session. Positions beyond T blocks are
    not copied. Raises InvalidRequestError if `rows` has another shape.
    """
    if rows.dim() != 2 or rows.shape[0] != slots.shape[0]:
        raise InvalidRequestError(f"rows {tuple(rows.shape)} for {slots.shape[0]} sessions")
    launch = compact_kv_triton if storage.is_cuda else compact_kv_torch
    launch(storage, rows, counts, context, tables, slots, block_tokens=block_tokens)


def compact_kv_torch(
    storage: Tensor,
    rows: Tensor,
    counts: Tensor,
    context: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    block_tokens: int,
) -> None:
    """Compute `compact_kv` with PyTorch operators."""
    order = torch.arange(rows.shape[1], device=rows.device)
    used = order < counts[:, None]
    start = context[:, None]
    source = pool_slots(tables, slots, start + torch.where(used, rows, order), block_tokens)
    target = pool_slots(tables, slots, start + order, block_tokens)
    moved = used & (rows != order) & (source >= 0)
    storage[:, :, :, target[moved]] = storage[:, :, :, source[moved]]


def compact_kv_triton(
    storage: Tensor,
    rows: Tensor,
    counts: Tensor,
    context: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    block_tokens: int,
) -> None:
    """Compute `compact_kv` in one kernel, one program per session, layer and head."""
    _, num_layers, num_heads, _, dim = storage.shape
    _compact_kernel[(num_heads, num_layers, rows.shape[0])](
        storage,
        rows,
        counts,
        context,
        tables,
        slots,
        storage.stride(0),
        storage.stride(1),
        storage.stride(2),
        rows.stride(0),
        tables.stride(0),
        tables.shape[1],
        BLOCK_TOKENS=block_tokens,
        DIM=dim,
        DIMS=next_power_of_2(dim),
        num_warps=1,
    )


@triton.jit
def _compact_kernel(
    storage_ptr,
    rows_ptr,
    counts_ptr,
    context_ptr,
    tables_ptr,
    slots_ptr,
    kind_stride,
    layer_stride,
    head_stride,
    rows_stride,
    table_stride,
    table_width,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    b = tl.program_id(2)
    count = tl.load(counts_ptr + b)
    context = tl.load(context_ptr + b)
    table = tables_ptr + tl.load(slots_ptr + b).to(tl.int64) * table_stride
    head = (
        tl.program_id(1).to(tl.int64) * layer_stride + tl.program_id(0).to(tl.int64) * head_stride
    )
    dims = tl.arange(0, DIMS)
    inside = dims < DIM
    keys = storage_ptr + head + dims
    values = keys + kind_stride
    # A target is never the source of a later row (rows[j] >= j, ascending), so rows move one after
    # another. Every feature is read and written by one thread, which keeps that order.
    for j in range(1, count):
        row = tl.load(rows_ptr + b * rows_stride + j)
        source = context + row
        if (row != j) & (source // BLOCK_TOKENS < table_width):
            target = context + j
            block = tl.load(table + source // BLOCK_TOKENS).to(tl.int64)
            source_offset = (block * BLOCK_TOKENS + source % BLOCK_TOKENS) * DIM
            block = tl.load(table + target // BLOCK_TOKENS).to(tl.int64)
            target_offset = (block * BLOCK_TOKENS + target % BLOCK_TOKENS) * DIM
            key = tl.load(keys + source_offset, mask=inside)
            value = tl.load(values + source_offset, mask=inside)
            tl.store(keys + target_offset, key, mask=inside)
            tl.store(values + target_offset, value, mask=inside)


def gather_rows(src: Tensor, rows: Tensor, *, num_nodes: int) -> Tensor:
    """Select rows within each session: row b * N + j of the result, [B * N, H], is row b * N +
    max(rows[b, j], 0) of src.

    src: [B * N, H], rows of any stride. rows: int32 [B, N]. Raises InvalidRequestError if `rows` or
    `src` has another shape.
    """
    if rows.dim() != 2 or rows.shape[1] != num_nodes or src.shape[0] != rows.numel():
        raise InvalidRequestError(
            f"rows {tuple(rows.shape)} for {num_nodes} nodes, source {tuple(src.shape)}"
        )
    return (gather_rows_triton if src.is_cuda else gather_rows_torch)(
        src, rows, num_nodes=num_nodes
    )


def gather_rows_torch(src: Tensor, rows: Tensor, *, num_nodes: int) -> Tensor:
    """Compute `gather_rows` with PyTorch operators."""
    first = torch.arange(rows.shape[0], device=rows.device)[:, None] * num_nodes
    return src[(first + rows.clamp(min=0)).flatten()]


def gather_rows_triton(src: Tensor, rows: Tensor, *, num_nodes: int) -> Tensor:
    """Compute `gather_rows` in one kernel."""
    num_rows, width = src.shape
    out = torch.empty((num_rows, width), dtype=src.dtype, device=src.device)
    block = min(next_power_of_2(width), _GATHER_BLOCK)
    _gather_kernel[(cdiv(width, block), num_nodes, rows.shape[0])](
        src,
        rows,
        out,
        src.stride(0),
        rows.stride(0),
        num_nodes,
        width,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _gather_kernel(
    src_ptr, rows_ptr, out_ptr, src_stride, rows_stride, num_nodes, width, BLOCK: tl.constexpr
):
    j, b = tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.maximum(tl.load(rows_ptr + b * rows_stride + j), 0)
    source = src_ptr + (b * num_nodes + row).to(tl.int64) * src_stride
    target = out_ptr + (b * num_nodes + j).to(tl.int64) * width
    inside = column < width
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
