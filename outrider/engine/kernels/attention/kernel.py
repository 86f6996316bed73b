# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Triton kernels of tree attention over the paged KV cache, with a split context.

They are launched by `outrider.engine.kernels.attention.tree`. A program processes one key/value
head of one session, with all N * g query rows that read it (N nodes, g query heads per key/value
head) or a tile of them, over one part of the context. A second kernel joins the parts, as in
Flash-Decoding (Dao et al. 2023). The softmax is the online softmax of Milakov and Gimelshein
(2018).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.runtime import dot


@triton.jit
def attention_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    slots_ptr,
    context_ptr,
    mask_ptr,
    positions_ptr,
    out_ptr,
    stats_ptr,
    q_stride,
    keys_stride,
    values_stride,
    table_stride,
    table_slots,
    scale,
    num_nodes,
    width,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SINGLE: tl.constexpr,
    MASKED: tl.constexpr,
    MASK_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Compute attention of one tile of query rows to one part of the context.

    The code is kept small: a program runs most of it only once, so that instruction fetches take as
    long as execution.

    MASK_BITS: number of columns of the tree mask that are kept as bits of integers, a power of two
    up to 128. If there are more columns, it is 0, and every step loads the mask from memory.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    b = tl.program_id(2)
    context = tl.load(context_ptr + b)
    table = tables_ptr + tl.load(slots_ptr + b).to(tl.int64) * table_stride
    # Parts are cut from the actual length, so that the work is even whatever max_len is.
    total = tl.minimum(context + width, table_slots)
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - (WINDOW - 1), 0) // BLOCK_SLOTS * BLOCK_SLOTS
    part = tl.cdiv(tl.cdiv(total - first, BLOCK_SLOTS), splits) * BLOCK_SLOTS
    low = first + split * part
    high = tl.minimum(low + part, total)

    place = tl.arange(0, BLOCK_SLOTS)
    read = tl.minimum(low + place, total - 1)
    block = tl.load(table + read // BLOCK_TOKENS)

    tile_row = tl.program_id(0) // KV_HEADS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = tile_row // GROUP
    exists = node < num_nodes
    row = b * num_nodes + node
    head = kv_head * GROUP + tile_row % GROUP
    dims = tl.arange(0, DIMS)
    used = exists[:, None] & (dims < DIM)[None, :]
    q_ptrs = q_ptr + (row * q_stride + head * DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=used, other=0.0)
    mask_rows = mask_ptr + row * width
    bits, more_bits, oldest = node, node, node
    if MASK_BITS > 0:
        bits = _packed(mask_rows, exists, width, MASK_BITS if MASK_BITS < 64 else 64)
    if MASK_BITS > 64:
        more_bits = _packed(mask_rows + 64, exists, width - 64, 64)
    if WINDOW > 0:
        oldest = tl.load(positions_ptr + row, mask=exists, other=0) - (WINDOW - 1)

    keys = keys_ptr + kv_head.to(tl.int64) * keys_stride
    values = values_ptr + kv_head.to(tl.int64) * values_stride
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, DIMS], tl.float32)
    for start in range(low, high, BLOCK_SLOTS):
        slot = start + place
        offsets = (block * BLOCK_TOKENS + read % BLOCK_TOKENS) * DIM
        offsets = offsets[:, None] + dims[None, :]
        read = tl.minimum(slot + BLOCK_SLOTS, total - 1)
        block = tl.load(table + read // BLOCK_TOKENS)
        k = load_slots(keys + offsets, dims, DIM, DIMS)
        v = load_slots(values + offsets, dims, DIM, DIMS)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_SLOTS], tl.float32))
        seen = _seen(
            slot,
            context,
            total,
            node,
            exists,
            mask_rows,
            bits,
            more_bits,
            positions_ptr + b * num_nodes,
            oldest,
            MASKED,
            MASK_BITS,
            WINDOW,
        )
        scores = tl.where(seen, scores * scale, float("-inf"))
        weights, top, norm, decay = _softmax_step(scores, top, norm)
        acc = dot(weights.to(v.dtype), v, acc * decay[:, None])

    # Asked so that a NaN stays one.
    divisor = tl.where(norm == 0, 1.0, norm)
    acc = acc * (1.0 / divisor)[:, None]
    out_row = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
    out_ptrs = out_ptr + (out_row * DIM)[:, None] + dims[None, :]
    if SINGLE:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=used)
    else:
        stats = tl.where(norm == 0, float("-inf"), top + tl.log2(divisor))
        tl.store(stats_ptr + out_row, stats, mask=exists)
        if low < high:
            tl.store(out_ptrs, acc, mask=used)


@triton.jit
def _seen(
    slot,
    context,
    total,
    node,
    exists,
    mask_rows,
    bits,
    more_bits,
    positions,
    oldest,
    MASKED: tl.constexpr,
    MASK_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return bool [rows, slots]: whether each row attends to each slot."""
    after = slot - context
    drafted = (after >= 0) & (slot < total)
    if not MASKED:
        seen = slot[None, :] <= tl.minimum(context + node, total - 1)[:, None]
    elif MASK_BITS > 0:
        bit = tl.minimum(tl.maximum(after, 0), MASK_BITS - 1)
        word = bits[:, None]
        if MASK_BITS > 64:
            word = tl.where((bit < 64)[None, :], bits[:, None], more_bits[:, None])
        seen = ((word >> (bit % 64).to(tl.int64)[None, :]) & 1) != 0
        seen = (seen | (after < 0)[None, :]) & (slot < total)[None, :]
    else:
        there = exists[:, None] & drafted[None, :]
        seen = tl.load(mask_rows[:, None] + after[None, :], mask=there, other=0) != 0
        seen = (seen | (after < 0)[None, :]) & (slot < total)[None, :]
    if WINDOW > 0:
        place = tl.load(positions + after, mask=drafted, other=0)
        place = tl.where(after < 0, slot, place)
        seen = seen & (place[None, :] >= oldest[:, None])
    return seen


@triton.jit
def _packed(mask_rows, exists, width, COLUMNS: tl.constexpr):
    """Return mask rows of up to 64 columns as bits of an int64. Bit w is set if the row attends to
    column w."""
    column = tl.arange(0, COLUMNS)
    there = exists[:, None] & (column < width)[None, :]
    seen = tl.load(mask_rows[:, None] + column[None, :], mask=there, other=0) != 0
    return tl.sum(seen.to(tl.int64) << column[None, :].to(tl.int64), axis=1)


@triton.jit
def load_slots(ptrs, dims, DIM: tl.constexpr, DIMS: tl.constexpr):
    # Without padding no mask is made, so that the loads stay plain copies.
    inside = (dims < DIM)[None, :]
    return tl.load(ptrs) if DIM == DIMS else tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _softmax_step(scores, top, norm):
    """Return the weights of new scores, the new running maximum and sum, and the factor by which to
    scale older weights."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # Rows that saw nothing yet: inf - inf would be a NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return weights, new_top, norm * decay + tl.sum(weights, axis=1), decay


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    num_rows,
    splits,
    ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Join the parts of the context for ROWS rows. A row is one query head of one token row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, DIMS)
    part = row[:, None] * splits + split[None, :]
    present = (row < num_rows)[:, None] & (split < splits)[None, :]
    stats = tl.load(stats_ptr + part, mask=present, other=float("-inf"))
    # An empty part wrote no sums: what its place holds must not be read.
    filled = stats != float("-inf")
    weights = tl.exp2(stats - tl.max(tl.where(filled, stats, -1e30), axis=1)[:, None])
    inside = (dims < DIM)[None, None, :]
    ptrs = partial_ptr + part[:, :, None] * DIM + dims[None, None, :]
    parts = tl.load(ptrs, mask=filled[:, :, None] & inside, other=0.0)
    norm = tl.sum(weights, axis=1)
    out = tl.sum(parts * weights[:, :, None], axis=1) / tl.where(norm == 0, 1.0, norm)[:, None]
    ptrs = out_ptr + row[:, None] * DIM + dims[None, :]
    inside = (row < num_rows)[:, None] & (dims < DIM)[None, :]
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
