# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Kernels for penalties, logit biases, bans and grammar masks, and for token counts.

The kernel `edit` is the first one of the logits processor
(`outrider.engine.kernels.logits_processor.process`) and runs before those of `truncation`. Programs
for rows without such parameters return immediately.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.logits_processor.token_masks import allowed_tile
from outrider.engine.kernels.session_tensors import PROCESS_BIAS, PROCESS_GRAMMAR, PROCESS_PENALTIES
from outrider.engine.logits_processor import MAX_LOGIT

_PENALTIES = tl.constexpr(PROCESS_PENALTIES)
_ENTRIES = tl.constexpr(PROCESS_BIAS)
_MAX_LOGIT = tl.constexpr(MAX_LOGIT)
_LEGAL = tl.constexpr(PROCESS_GRAMMAR)
_LAST_INT32 = tl.constexpr(2**31 - 1)
_ENTRY_BLOCK = tl.constexpr(256)


@triton.jit
def edit(
    logits_ptr,
    logits_stride,
    num_columns,
    flags_ptr,
    penalties_ptr,
    counts_ptr,
    entry_counts_ptr,
    entry_columns_ptr,
    entry_amounts_ptr,
    entry_ends_ptr,
    entries,
    slots_ptr,
    positions_ptr,
    path_ptr,
    path_stride,
    path_len,
    seen,
    mask_ptr,
    mask_owner_stride,
    mask_row_stride,
    bits_ptr,
    words,
    allowed_index_ptr,
    maxima_ptr,
    found_ptr,
    rows_per_slot,
    HAS_PATH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LEGAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Apply penalties, biases, bans and grammar masks to one tile of one row, and store the tile's
    maximum, clamped to MAX_LOGIT."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    owner = row // rows_per_slot
    place = row % rows_per_slot
    slot = tl.load(slots_ptr + owner).to(tl.int64)
    flags = tl.load(flags_ptr + slot)
    if flags != 0:
        columns = part * TILE + tl.arange(0, TILE)
        valid = columns < num_columns
        logits_ptr += row * logits_stride
        old = tl.load(logits_ptr + columns, mask=valid, other=float("-inf"))
        values = old
        if (flags & _PENALTIES) != 0:
            counts = tl.load(counts_ptr + slot * num_columns + columns, mask=valid, other=0)
            if HAS_PATH:
                for step in range(path_len):
                    token = tl.load(path_ptr + owner * path_stride + step)
                    if HAS_MASK:
                        where = (
                            mask_ptr + owner * mask_owner_stride + place * mask_row_stride + step
                        )
                        on_path = tl.load(where) != 0
                    else:
                        on_path = step < seen + place
                    counts += tl.where((columns == token) & on_path, 2, 0)
            repetition = tl.load(penalties_ptr + 3 * slot)
            frequency = tl.load(penalties_ptr + 3 * slot + 1).to(tl.float64)
            presence = tl.load(penalties_ptr + 3 * slot + 2).to(tl.float64)
            # Products of float32 values are exact in float64, so that fusing them changes nothing.
            larger = (values.to(tl.float64) * repetition.to(tl.float64)).to(tl.float32)
            smaller = tl.div_rn(values, tl.zeros_like(values) + repetition)
            repeated = tl.where(values > 0.0, smaller, larger)
            values = tl.where(counts > 0, repeated, values)
            amounts = ((counts >> 1).to(tl.float64) * frequency + presence).to(tl.float32)
            values = tl.where(counts > 1, values - amounts, values)
        if (flags & _ENTRIES) != 0:
            count = tl.load(entry_counts_ptr + slot)
            begin = part * TILE
            first = tl.full((), 0, tl.int32)
            last = tl.full((), 0, tl.int32)
            for start in range(0, count, _ENTRY_BLOCK):
                index = start + tl.arange(0, _ENTRY_BLOCK)
                ids = tl.load(
                    entry_columns_ptr + slot * entries + index,
                    mask=index < count,
                    other=_LAST_INT32,
                )
                first += tl.sum((ids < begin).to(tl.int32), 0)
                last += tl.sum((ids < begin + TILE).to(tl.int32), 0)
            position = tl.load(positions_ptr + row)
            for entry in range(first, last):
                here = slot * entries + entry
                amount = tl.load(entry_amounts_ptr + here)
                banned = position < tl.load(entry_ends_ptr + here)
                changed = tl.where(banned, float("-inf"), values + amount)
                values = tl.where(columns == tl.load(entry_columns_ptr + here), changed, values)
        if HAS_LEGAL:  # noqa: SIM102 (decided when it is compiled)
            if (flags & _LEGAL) != 0:
                allowed = allowed_tile(bits_ptr, words, allowed_index_ptr, row, columns)
                values = tl.where(allowed, values, float("-inf"))
        values = tl.where(values == values, values, float("-inf"))
        tl.store(logits_ptr + columns, values, mask=valid & ((values == old) == 0))
        # Greedy sessions compare logits as they are; maxima are for the cuts of those that sample.
        top = tl.minimum(tl.max(values, 0), _MAX_LOGIT)
        tl.store(maxima_ptr + row * tl.num_programs(1) + part, top)
        if part == 0:
            tl.store(found_ptr + row, 0)


@triton.jit
def add_counts(
    tokens_ptr,
    tokens_stride,
    new_ptr,
    flags_ptr,
    counts_ptr,
    num_columns,
    slots_ptr,
    columns_ptr,
    num_ids,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Add one session's new tokens to its output counts."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (tl.load(flags_ptr + slot) & _PENALTIES) != 0:
        index = tl.arange(0, BLOCK)
        new = (index < tl.load(new_ptr + row)) & (index < WIDTH)
        columns = tl.load(tokens_ptr + row * tokens_stride + index, mask=new, other=-1)
        known = new & (columns >= 0) & (columns < num_ids)
        if HAS_COLUMNS:
            columns = tl.load(columns_ptr + columns, mask=known, other=-1)
            known = known & (columns >= 0)
        tl.atomic_add(counts_ptr + slot * num_columns + columns, 2, mask=known)
