# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The kernels of `outrider.engine.kernels.attention`.

A program takes one key/value head of one bucket row and all N * g query rows that read it (or a
tile of them), over one part of the context; a second kernel joins the parts, as in Flash-Decoding
(Dao et al. 2023). The softmax is the online one of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.runtime import dot


@triton.jit
def attention_kernel(
    q_ptr,
    rotary_ptr,
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
    WINDOW: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """ROTATES: q_ptr holds query, key and value heads that are not rotated yet. The keys and
    values of the slots after the context come from there, and go to the cache from here."""
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    b = tl.program_id(2)
    context = tl.load(context_ptr + b)
    table = tables_ptr + tl.load(slots_ptr + b).to(tl.int64) * table_stride
    tile_row = tl.program_id(0) // KV_HEADS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = tile_row // GROUP
    exists = node < num_nodes
    row = b.to(tl.int64) * num_nodes + node
    head = kv_head * GROUP + tile_row % GROUP
    dims = tl.arange(0, DIMS)
    used = exists[:, None] & (dims < DIM)[None, :]
    q_ptrs = q_ptr + row[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptrs, mask=used, other=0.0)
    if ROTATES:
        turned = _turn(q, rotary_ptr, row, exists, DIM, BLOCK_ROWS, INTERLEAVED)
        q = turned.to(keys_ptr.dtype.element_ty)
    oldest = tl.zeros([BLOCK_ROWS], tl.int32)
    if WINDOW > 0:
        oldest = tl.load(positions_ptr + row, mask=exists, other=0) - (WINDOW - 1)

    # Parts are cut from the actual length, so that the work is even whatever max_len is.
    total = tl.minimum(context + width, table_slots)
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - (WINDOW - 1), 0) // BLOCK_SLOTS * BLOCK_SLOTS
    part = tl.cdiv(tl.cdiv(total - first, BLOCK_SLOTS), splits) * BLOCK_SLOTS
    low = first + split * part
    high = tl.minimum(low + part, total)
    plain = tl.maximum(tl.minimum(high, context) - low, 0) // BLOCK_SLOTS * BLOCK_SLOTS

    keys = keys_ptr + kv_head.to(tl.int64) * keys_stride
    values = values_ptr + kv_head.to(tl.int64) * values_stride
    mask_rows = mask_ptr + row * width
    positions = positions_ptr + b.to(tl.int64) * num_nodes
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, DIMS], tl.float32)
    for start in tl.range(low, low + plain, BLOCK_SLOTS, num_stages=STAGES):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        block = tl.load(table + slot // BLOCK_TOKENS)
        offsets = (block * BLOCK_TOKENS + slot % BLOCK_TOKENS) * DIM
        offsets = offsets[:, None] + dims[None, :]
        k = _load_slots(keys + offsets, dims, DIM, DIMS)
        v = _load_slots(values + offsets, dims, DIM, DIMS)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_SLOTS], tl.float32), INTERPRETED)
        scores *= scale
        if WINDOW > 0:
            scores = tl.where(slot[None, :] >= oldest[:, None], scores, float("-inf"))
        weights, top, norm, decay = _softmax_step(scores, top, norm)
        acc = dot(weights.to(v.dtype), v, acc * decay[:, None], INTERPRETED)
    # The steps that hold slots after the context, or that end early.
    for start in tl.range(low + plain, high, BLOCK_SLOTS, num_stages=1):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        inside = slot < high
        block = tl.load(table + slot // BLOCK_TOKENS, mask=inside, other=0)
        offsets = (block * BLOCK_TOKENS + slot % BLOCK_TOKENS) * DIM
        offsets = offsets[:, None] + dims[None, :]
        there = inside[:, None] & (dims < DIM)[None, :]
        after = slot - context
        if ROTATES:
            fresh = inside & (after >= 0)
            there = there & (after < 0)[:, None]
        k = tl.load(keys + offsets, mask=there, other=0.0)
        v = tl.load(values + offsets, mask=there, other=0.0)
        if ROTATES:
            source = b.to(tl.int64) * num_nodes + after
            at_key = source * q_stride + (KV_HEADS * GROUP + kv_head) * DIM
            at_key = q_ptr + at_key[:, None] + dims[None, :]
            new_k = tl.load(at_key, mask=fresh[:, None], other=0.0)
            new_k = _turn(new_k, rotary_ptr, source, fresh, DIM, BLOCK_SLOTS, INTERLEAVED)
            new_v = tl.load(at_key + KV_HEADS * DIM, mask=fresh[:, None], other=0.0)
            k = tl.where(fresh[:, None], new_k.to(k.dtype), k)
            v = tl.where(fresh[:, None], new_v, v)
            # Other row tiles of the same head read the same rows; one of them keeps them.
            if tl.program_id(0) < KV_HEADS:
                tl.store(keys + offsets, k, mask=fresh[:, None])
                tl.store(values + offsets, v, mask=fresh[:, None])
        if MASKED:
            column = exists[:, None] & (inside & (after >= 0))[None, :]
            seen = tl.load(mask_rows[:, None] + after[None, :], mask=column, other=0) != 0
            seen = seen | (after < 0)[None, :]
        else:
            seen = after[None, :] <= node[:, None]
        seen = seen & inside[None, :]
        if WINDOW > 0:
            place = tl.load(positions + after, mask=inside & (after >= 0), other=0)
            place = tl.where(after < 0, slot, place)
            seen = seen & (place[None, :] >= oldest[:, None])
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_SLOTS], tl.float32), INTERPRETED)
        scores = tl.where(seen, scores * scale, float("-inf"))
        weights, top, norm, decay = _softmax_step(scores, top, norm)
        acc = dot(weights.to(v.dtype), v, acc * decay[:, None], INTERPRETED)

    divisor = tl.where(norm > 0, norm, 1.0)
    acc = acc / divisor[:, None]
    out_row = (row * (KV_HEADS * GROUP) + head) * splits + split
    out_ptrs = out_ptr + out_row[:, None] * DIM + dims[None, :]
    if SINGLE:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=used)
    else:
        stats = tl.where(norm > 0, top + tl.log2(divisor), float("-inf"))
        tl.store(stats_ptr + out_row, stats, mask=exists)
        if low < high:
            tl.store(out_ptrs, acc, mask=used)


@triton.jit
def _turn(
    x,
    rotary_ptr,
    row,
    there,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotated heads, float32 [ROWS, DIM], by the table's entry of each token row (see `rotary`)."""
    PAIRS: tl.constexpr = DIM // 2
    pair = tl.arange(0, PAIRS)
    at = rotary_ptr + row[:, None] * DIM + pair[None, :]
    cos = tl.load(at, mask=there[:, None], other=1.0)
    sin = tl.load(at + PAIRS, mask=there[:, None], other=0.0)
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(x.to(tl.float32), (ROWS, PAIRS, 2)))
    else:
        halves = tl.reshape(x.to(tl.float32), (ROWS, 2, PAIRS))
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
    turned = tl.join(first * cos - second * sin, first * sin + second * cos)
    if not INTERLEAVED:
        turned = tl.permute(turned, (0, 2, 1))
    return tl.reshape(turned, (ROWS, DIM))


@triton.jit
def _load_slots(ptrs, dims, DIM: tl.constexpr, DIMS: tl.constexpr):
    # Without padding no mask is made, so that the loads stay plain copies.
    inside = (dims < DIM)[None, :]
    return tl.load(ptrs) if DIM == DIMS else tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _softmax_step(scores, top, norm):
    """Weights of new scores, the new running maximum and sum, and the factor of older weights."""
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
    """Join the parts of ROWS rows (a row: one query head of one token row)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, DIMS)
    part = row[:, None] * splits + split[None, :]
    present = (row < num_rows)[:, None] & (split < splits)[None, :]
    stats = tl.load(stats_ptr + part, mask=present, other=float("-inf"))
    # An empty part wrote no sums: what its place holds must not be read.
    filled = stats > float("-inf")
    weights = tl.exp2(stats - tl.max(tl.where(filled, stats, -1e30), axis=1)[:, None])
    inside = (dims < DIM)[None, None, :]
    ptrs = partial_ptr + part[:, :, None] * DIM + dims[None, None, :]
    parts = tl.load(ptrs, mask=filled[:, :, None] & inside, other=0.0)
    norm = tl.sum(weights, axis=1)
    out = tl.sum(parts * weights[:, :, None], axis=1) / tl.where(norm > 0, norm, 1.0)[:, None]
    ptrs = out_ptr + row[:, None] * DIM + dims[None, :]
    inside = (row < num_rows)[:, None] & (dims < DIM)[None, :]
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
