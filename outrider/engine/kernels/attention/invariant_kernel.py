# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Triton kernels of batch-invariant attention over the paged KV cache.

They are launched by `outrider.engine.kernels.attention.invariant`, whose docstring defines the
result of a row. A row attends to the positions 0 to p of its own path. A KV tile begins at each
multiple of TILE_SLOTS positions, and a split at each multiple of SPLIT_TILES tiles. The launch
parameters (rows of a program, splits that run in parallel) do not change the order of the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.attention.kernel import load_slots
from outrider.engine.kernels.runtime import dot

TILE_SLOTS = tl.constexpr(64)
"""Number of positions of a KV tile. The scores of a tile share one maximum."""
SPLIT_TILES = tl.constexpr(8)
"""Number of KV tiles of a split. The tiles of a split are joined from left to right, then the
splits are joined in the same way."""
_TWO = tl.constexpr(0x40000000)
"""Bits of the float32 2.0."""
_WEIGHT_UNIT = tl.constexpr(2.0**-22)
"""Distance between neighbouring float32 values in [2, 4)."""


@triton.jit
def _attend_tile(q, k, v, seen, scale, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Compute attention of `q` [ROWS, DIMS] to one KV tile. Return the maximum score, the sum of
    the weights and the weighted sum of the values of each row.

    The weights are summed as integers, so that the order of the sum does not change the result.
    """
    scores = dot(q, tl.trans(k), tl.zeros([ROWS, TILE_SLOTS], tl.float32))
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.max(scores, axis=1)
    # Rows that see nothing of the tile: inf - inf would be a NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2((scores - shift[:, None]) * scale).to(v.dtype)
    counted = (weights.to(tl.float32) + 2.0).to(tl.int32, bitcast=True) - _TWO
    norm = tl.sum(counted, axis=1).to(tl.float32) * _WEIGHT_UNIT
    acc = dot(weights, v, tl.zeros([ROWS, DIMS], tl.float32))
    return top, norm, acc


@triton.jit
def _join(top, norm, acc, next_top, next_norm, next_acc, scale):
    """Join the result so far with the result of the part to the right of it. An empty part changes
    no bit."""
    new_top = tl.maximum(top, next_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2((top - shift) * scale)
    weight = tl.exp2((next_top - shift) * scale)
    # Written as they are rounded, so that no compiler chooses.
    norm = tl.fma(norm, decay, next_norm * weight)
    wide_decay = tl.broadcast_to(decay[:, None], acc.shape)
    acc = tl.fma(acc, wide_decay, next_acc * weight[:, None])
    return new_top, norm, acc


@triton.jit
def _divide(norm, acc):
    """Return the weighted mean of the values; zeros for a row that attends to no position. NaN
    stays NaN."""
    return acc * tl.div_rn(1.0, tl.where(norm == 0, 1.0, norm))[:, None]


@triton.jit
def _tiles(context, num_nodes, table_slots, TREE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first KV tile that any row of a session attends to, and the end (exclusive) of the
    tiles that its rows share.

    The rows of a tree share the tiles in which all positions belong to the context.
    """
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - (WINDOW - 1), 0) // TILE_SLOTS
    if TREE:
        end = tl.minimum(context, table_slots) // TILE_SLOTS
    else:
        end = tl.cdiv(tl.minimum(context + num_nodes, table_slots), TILE_SLOTS)
    return first, end


@triton.jit
def _part_tiles(first, end, max_parts):
    """Return the number of KV tiles of one part: 1, or a whole split if there would be more than
    `max_parts` parts."""
    return tl.where(end - first <= max_parts, 1, SPLIT_TILES)


@triton.jit
def shared_tiles_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    slots_ptr,
    context_ptr,
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
    max_parts,
    allocated,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Compute attention of one tile of query rows to the KV tiles that all rows of the session
    share.

    With SINGLE, a program processes all of these KV tiles and writes the result to `out`. Else it
    processes some parts of them (a part is one KV tile or one split), and `joining_kernel` joins
    the parts. The maximum and the sum of weights of each part go to `stats` [rows, heads,
    allocated, 2], the weighted values to `out` [rows, heads, allocated, DIM].
    """
    kv_head = tl.program_id(0) % KV_HEADS
    b = tl.program_id(2)
    context = tl.load(context_ptr + b)
    table = tables_ptr + tl.load(slots_ptr + b).to(tl.int64) * table_stride
    first, end = _tiles(context, num_nodes, table_slots, TREE, WINDOW)
    part_tiles = _part_tiles(first, end, max_parts)
    step = SPLIT_TILES if SINGLE else part_tiles
    first_part = first // step

    row_tile = tl.program_id(0) // KV_HEADS * BLOCK_ROWS
    tile_row = row_tile + tl.arange(0, BLOCK_ROWS)
    node = tile_row // GROUP
    exists = node < num_nodes
    row = b * num_nodes + node
    head = kv_head * GROUP + tile_row % GROUP
    dims = tl.arange(0, DIMS)
    used = exists[:, None] & (dims < DIM)[None, :]
    q = tl.load(q_ptr + (row * q_stride + head * DIM)[:, None] + dims[None, :], used, other=0.0)
    position = tl.load(positions_ptr + row, mask=exists, other=0)
    out_row = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    if not TREE:
        # Rows of prompts come in many tiles: later tiles than this one's own rows see are left.
        last_node = tl.minimum((row_tile + BLOCK_ROWS - 1) // GROUP, num_nodes - 1)
        end = tl.minimum(end, (context + last_node) // TILE_SLOTS + 1)

    newest = tl.minimum(position, tl.minimum(end * TILE_SLOTS, table_slots) - 1)
    place = tl.arange(0, TILE_SLOTS)
    keys = keys_ptr + kv_head.to(tl.int64) * keys_stride
    values = values_ptr + kv_head.to(tl.int64) * values_stride
    whole_top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    whole_norm = tl.zeros([BLOCK_ROWS], tl.float32)
    whole_acc = tl.zeros([BLOCK_ROWS, DIMS], tl.float32)
    for part in range(first_part + tl.program_id(1), tl.cdiv(end, step), tl.num_programs(1)):
        low = tl.maximum(part * step, first)
        high = tl.minimum(part * step + step, end)
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, DIMS], tl.float32)
        read = tl.minimum(low * TILE_SLOTS + place, table_slots - 1)
        block = tl.load(table + read // BLOCK_TOKENS)
        for tile in range(low, high):
            slot = tile * TILE_SLOTS + place
            offsets = (block * BLOCK_TOKENS + read % BLOCK_TOKENS) * DIM
            offsets = offsets[:, None] + dims[None, :]
            # Asked for one tile ahead: keys and values wait for the block's number.
            read = tl.minimum(slot + TILE_SLOTS, table_slots - 1)
            block = tl.load(table + read // BLOCK_TOKENS)
            k = load_slots(keys + offsets, dims, DIM, DIMS)
            v = load_slots(values + offsets, dims, DIM, DIMS)
            seen = slot[None, :] <= newest[:, None]
            if WINDOW > 0:
                seen = seen & (slot[None, :] > position[:, None] - WINDOW)
            next_top, next_norm, next_acc = _attend_tile(q, k, v, seen, scale, BLOCK_ROWS, DIMS)
            top, norm, acc = _join(top, norm, acc, next_top, next_norm, next_acc, scale)
        if SINGLE:
            whole_top, whole_norm, whole_acc = _join(
                whole_top, whole_norm, whole_acc, top, norm, acc, scale
            )
        else:
            at = out_row * allocated + (part - first_part)
            tl.store(stats_ptr + 2 * at, top, mask=exists)
            tl.store(stats_ptr + 2 * at + 1, norm, mask=exists)
            tl.store(out_ptr + (at * DIM)[:, None] + dims[None, :], acc, mask=used)
    if SINGLE:
        result = _divide(whole_norm, whole_acc).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (out_row * DIM)[:, None] + dims[None, :], result, mask=used)


@triton.jit
def joining_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    slots_ptr,
    context_ptr,
    positions_ptr,
    paths_ptr,
    parts_ptr,
    stats_ptr,
    out_ptr,
    q_stride,
    keys_stride,
    values_stride,
    table_stride,
    table_slots,
    scale,
    num_nodes,
    path_len,
    max_parts,
    allocated,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Join the parts that `shared_tiles_kernel` stored for one token row and key/value head.

    For a row of a tree, also compute attention to the remaining KV tiles, beginning with the first
    one that has positions after the context. In these, the row reads the keys and values of its own
    path, in the order of their positions.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1) * HEADS // GROUP
    b = row // num_nodes
    context = tl.load(context_ptr + b)
    position = tl.load(positions_ptr + row)
    first, end = _tiles(context, num_nodes, table_slots, TREE, WINDOW)
    part_tiles = _part_tiles(first, end, max_parts)
    first_part = first // part_tiles
    own_end = tl.minimum(position, table_slots - 1) // TILE_SLOTS + 1
    if not TREE:
        end = tl.minimum(end, own_end)

    member = tl.arange(0, MEMBERS)
    exists = member < HEADS
    head = tl.program_id(1) * HEADS + member
    dims = tl.arange(0, DIMS)
    used = exists[:, None] & (dims < DIM)[None, :]
    place = tl.arange(0, TILE_SLOTS)
    out_row = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    if TREE:
        table = tables_ptr + tl.load(slots_ptr + b).to(tl.int64) * table_stride
        keys = keys_ptr + kv_head.to(tl.int64) * keys_stride
        values = values_ptr + kv_head.to(tl.int64) * values_stride
        at_q = (row * q_stride + head * DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptr + at_q, mask=used, other=0.0)

    whole_top = tl.full([MEMBERS], float("-inf"), tl.float32)
    whole_norm = tl.zeros([MEMBERS], tl.float32)
    whole_acc = tl.zeros([MEMBERS, DIMS], tl.float32)
    for split in range(first // SPLIT_TILES, tl.cdiv(own_end, SPLIT_TILES)):
        top = tl.full([MEMBERS], float("-inf"), tl.float32)
        norm = tl.zeros([MEMBERS], tl.float32)
        acc = tl.zeros([MEMBERS, DIMS], tl.float32)
        # Unrolled, so that the parts are read side by side.
        for index in tl.static_range(SPLIT_TILES):
            tile = split * SPLIT_TILES + index
            part = tl.where(part_tiles == 1, tile, split)
            there = (part_tiles == 1) & (tile >= first) & (tile < end)
            if index == 0:
                there = there | ((part_tiles > 1) & (tile < end))
            at = out_row * allocated + (part - first_part)
            is_read = member < tl.where(there, HEADS, 0)
            part_top = tl.load(stats_ptr + 2 * at, mask=is_read, other=float("-inf"))
            part_norm = tl.load(stats_ptr + 2 * at + 1, mask=is_read, other=0.0)
            at_values = (at * DIM)[:, None] + dims[None, :]
            inside = is_read[:, None] & (dims < DIM)[None, :]
            part_acc = tl.load(parts_ptr + at_values, mask=inside, other=0.0)
            top, norm, acc = _join(top, norm, acc, part_top, part_norm, part_acc, scale)
        if TREE:
            low = tl.maximum(tl.maximum(split * SPLIT_TILES, end), first)
            for tile in range(low, tl.minimum(split * SPLIT_TILES + SPLIT_TILES, own_end)):
                at_position = tile * TILE_SLOTS + place
                drafted = (at_position >= context) & (at_position <= position)
                at_path = row.to(tl.int64) * path_len + (at_position - context)
                node = tl.load(paths_ptr + at_path, mask=drafted, other=0)
                slot = tl.where(at_position < context, at_position, context + node)
                seen = (at_position <= position) & (slot < table_slots)
                if WINDOW > 0:
                    seen = seen & (at_position > position - WINDOW)
                slot = tl.minimum(slot, table_slots - 1)
                block = tl.load(table + slot // BLOCK_TOKENS)
                offsets = (block * BLOCK_TOKENS + slot % BLOCK_TOKENS) * DIM
                offsets = offsets[:, None] + dims[None, :]
                k = load_slots(keys + offsets, dims, DIM, DIMS)
                v = load_slots(values + offsets, dims, DIM, DIMS)
                own_top, own_norm, own_acc = _attend_tile(
                    q, k, v, seen[None, :], scale, MEMBERS, DIMS
                )
                top, norm, acc = _join(top, norm, acc, own_top, own_norm, own_acc, scale)
        whole_top, whole_norm, whole_acc = _join(
            whole_top, whole_norm, whole_acc, top, norm, acc, scale
        )
    result = _divide(whole_norm, whole_acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (out_row * DIM)[:, None] + dims[None, :], result, mask=used)
