# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Allowed-token mask lookup in kernels, over `session_tensors.AllowedTokenBits`."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.session_tensors import PROCESS_BIAS

_ENTRIES = tl.constexpr(PROCESS_BIAS)


@triton.jit
def allowed_tile(bits_ptr, words, index_ptr, row, columns):
    """Return for each column whether the grammar of a row allows it."""
    word = columns >> 5
    here = tl.load(index_ptr + row).to(tl.int64) * words + word
    bits = tl.load(bits_ptr + here, mask=word < words, other=0)
    return ((bits >> (columns & 31)) & 1) != 0


@triton.jit
def first_unbanned(
    entry_counts_ptr, entry_columns_ptr, entry_ends_ptr, entries, position, slot, flags
):
    """Return the first column that the session in `slot` does not ban at `position`."""
    free = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    if (flags & _ENTRIES) != 0:
        count = tl.load(entry_counts_ptr + slot)
    for entry in range(count):
        here = slot * entries + entry
        banned = position < tl.load(entry_ends_ptr + here)
        taken = banned & (tl.load(entry_columns_ptr + here) == free)
        free += tl.where(taken, 1, 0)
    return free


@triton.jit
def first_allowed(
    bits_ptr,
    words,
    index_ptr,
    row,
    num_columns,
    entry_counts_ptr,
    entry_columns_ptr,
    entry_ends_ptr,
    entries,
    position,
    slot,
    flags,
    TILE: tl.constexpr,
):
    """Return the first column that the row's grammar allows and the session does not ban at
    `position`. If all allowed columns are banned, return the first allowed one, because grammars
    take precedence over bans."""
    allowed_tokens = tl.full((), 0, tl.int32) + num_columns
    free = tl.full((), 0, tl.int32) + num_columns
    count = tl.full((), 0, tl.int32)
    if (flags & _ENTRIES) != 0:
        count = tl.load(entry_counts_ptr + slot)
    for start in range(0, num_columns, TILE):
        columns = start + tl.arange(0, TILE)
        allowed = allowed_tile(bits_ptr, words, index_ptr, row, columns) & (columns < num_columns)
        allowed_tokens = tl.minimum(
            allowed_tokens, tl.min(tl.where(allowed, columns, num_columns), 0)
        )
        for entry in range(count):
            here = slot * entries + entry
            banned = position < tl.load(entry_ends_ptr + here)
            column = tl.load(entry_columns_ptr + here)
            allowed = allowed & ((banned & (columns == column)) == 0)
        free = tl.minimum(free, tl.min(tl.where(allowed, columns, num_columns), 0))
    return tl.where(free < num_columns, free, allowed_tokens)
