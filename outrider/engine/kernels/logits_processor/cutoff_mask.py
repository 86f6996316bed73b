# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Last kernel of the logits processor: sets the logits of removed tokens to -inf."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.logits_processor.token_masks import first_allowed, first_unbanned
from outrider.engine.kernels.logits_processor.truncation import peak_of, score_of
from outrider.engine.kernels.sampling import scaled_tile
from outrider.engine.kernels.session_tensors import PROCESS_GRAMMAR, PROCESS_TRUNCATION

_CUTS = tl.constexpr(PROCESS_TRUNCATION)
_LEGAL = tl.constexpr(PROCESS_GRAMMAR)


@triton.jit
def finish(
    logits_ptr,
    logits_stride,
    num_columns,
    flags_ptr,
    temperatures_ptr,
    slots_ptr,
    entry_counts_ptr,
    entry_columns_ptr,
    entry_ends_ptr,
    entries,
    positions_ptr,
    bits_ptr,
    words,
    allowed_index_ptr,
    maxima_ptr,
    lowest_ptr,
    rows_per_slot,
    HAS_LEGAL: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Set the logits of one tile whose scores are below the lowest kept score of the row to -inf.
    If a row has no finite logit, set the logit of its first allowed column to 0, so that every row
    keeps a column."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row // rows_per_slot).to(tl.int64)
    flags = tl.load(flags_ptr + slot)
    if flags != 0:
        logits_ptr += row * logits_stride
        if peak_of(maxima_ptr, row, tl.num_programs(1), TILES) == float("-inf"):
            if part == 0:
                free = first_unbanned(
                    entry_counts_ptr,
                    entry_columns_ptr,
                    entry_ends_ptr,
                    entries,
                    tl.load(positions_ptr + row),
                    slot,
                    flags,
                )
                if HAS_LEGAL:  # noqa: SIM102 (decided when it is compiled)
                    if (flags & _LEGAL) != 0:
                        free = first_allowed(
                            bits_ptr,
                            words,
                            allowed_index_ptr,
                            row,
                            num_columns,
                            entry_counts_ptr,
                            entry_columns_ptr,
                            entry_ends_ptr,
                            entries,
                            tl.load(positions_ptr + row),
                            slot,
                            flags,
                            TILE,
                        )
                tl.store(logits_ptr + tl.where(free < num_columns, free, 0), 0.0)
        elif (flags & _CUTS) != 0:
            columns = part * TILE + tl.arange(0, TILE)
            valid = columns < num_columns
            temperature, lowest = tl.load(temperatures_ptr + slot), tl.load(lowest_ptr + row)
            best = tl.load(maxima_ptr + row * tl.num_programs(1) + part)
            below = valid
            if score_of(best, temperature) >= lowest:
                scores = scaled_tile(logits_ptr, columns, valid, temperature)
                below = valid & (scores < lowest)
            tl.store(logits_ptr + columns, float("-inf"), mask=below)
