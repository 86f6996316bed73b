# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Triton kernels of draft distribution sampling, in the order in which they run.

`outrider.engine.kernels.drafts.distribution_sampling` launches them.

1. Find the largest score of every tile.
2. Count the columns of every tile whose quantised probability is above zero.
3. Gather these columns and their quantised probabilities, one row after another.
4. Truncate each row by total probability and number of columns, and draw one of the kept columns;
   one program per row.

A quantised probability is an integer count up to 65535. Sums of counts are below 2^53, so they are
exact in float64, and the set of kept columns does not depend on the order of summation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.noise import gumbel, noise_bits, noise_key
from outrider.engine.kernels.sampling import scaled_tile
from outrider.engine.kernels.session_tensors import RULE_REJECTION
from outrider.spec.noise import NoiseStream

_REJECTION = tl.constexpr(RULE_REJECTION)
_DRAFT = tl.constexpr(int(NoiseStream.DRAFT))
_MAX_COUNT = tl.constexpr(65535)
_NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def draws(temperatures_ptr, rules_ptr, slot):
    """Return whether the session in `slot` draws its drafts from a distribution: it does under the
    rejection rule with a temperature above 0."""
    return (tl.load(temperatures_ptr + slot) > 0.0) & (tl.load(rules_ptr + slot) == _REJECTION)


@triton.jit
def max_tiles(
    logits_ptr,
    logits_stride,
    num_columns,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    maxima_ptr,
    TILE: tl.constexpr,
):
    """Store the largest score of one tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if draws(temperatures_ptr, rules_ptr, slot):
        columns = part * TILE + tl.arange(0, TILE)
        valid = columns < num_columns
        temperature = tl.load(temperatures_ptr + slot)
        scores = scaled_tile(logits_ptr + row * logits_stride, columns, valid, temperature)
        tl.store(maxima_ptr + row * tl.num_programs(1) + part, tl.max(scores, 0))


@triton.jit
def _counts(
    logits_ptr,
    maxima_ptr,
    row,
    tiles,
    columns,
    num_columns,
    temperature,
    TILES: tl.constexpr,
):
    """Return the quantised probabilities (counts) of a tile's columns, int32. In a row without a
    finite score, the first column has the maximum count."""
    parts = tl.arange(0, TILES)
    maxima = tl.load(maxima_ptr + row * tiles + parts, mask=parts < tiles, other=float("-inf"))
    top = tl.max(maxima, 0)
    valid = columns < num_columns
    scores = scaled_tile(logits_ptr, columns, valid, temperature)
    some = top > float("-inf")
    weights = tl.exp(scores - tl.where(some, top, 0.0))
    rounded = tl.floor(weights.to(tl.float64) * _MAX_COUNT + 0.5).to(tl.int32)
    only = tl.where(columns == 0, _MAX_COUNT, 0)
    return tl.where(valid, tl.where(some, rounded, only), 0).to(tl.int32)


@triton.jit
def count_tiles(
    logits_ptr,
    logits_stride,
    num_columns,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    maxima_ptr,
    found_ptr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the number of columns of one tile whose count is above zero."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    if draws(temperatures_ptr, rules_ptr, slot):
        columns = part * TILE + tl.arange(0, TILE)
        temperature = tl.load(temperatures_ptr + slot)
        row_ptr = logits_ptr + row * logits_stride
        counts = _counts(row_ptr, maxima_ptr, row, tiles, columns, num_columns, temperature, TILES)
        tl.store(found_ptr + row * tiles + part, tl.sum((counts > 0).to(tl.int32), 0))


@triton.jit
def gather_tiles(
    logits_ptr,
    logits_stride,
    num_columns,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    maxima_ptr,
    found_ptr,
    columns_ptr,
    counts_ptr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the columns of one tile with counts above zero, and the counts, behind those of the
    preceding tiles of the row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    if draws(temperatures_ptr, rules_ptr, slot):
        columns = part * TILE + tl.arange(0, TILE)
        temperature = tl.load(temperatures_ptr + slot)
        row_ptr = logits_ptr + row * logits_stride
        counts = _counts(row_ptr, maxima_ptr, row, tiles, columns, num_columns, temperature, TILES)
        parts = tl.arange(0, TILES)
        before = tl.sum(tl.load(found_ptr + row * tiles + parts, mask=parts < part, other=0), 0)
        some = counts > 0
        places = row * num_columns + before + tl.cumsum(some.to(tl.int32), axis=0) - 1
        tl.store(columns_ptr + places, columns, mask=some)
        tl.store(counts_ptr + places, counts, mask=some)


@triton.jit
def _at_least(counts_ptr, size, edge, BLOCK: tl.constexpr):
    """Return the number and the sum (float64) of the counts that are at least `edge`."""
    number = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + at, mask=at < size, other=0)
        inside = counts >= edge
        number += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, counts, 0), 0).to(tl.float64)
    return number, mass


@triton.jit
def cut_and_draw(
    temperatures_ptr,
    rules_ptr,
    stream_keys_ptr,
    slots_ptr,
    positions_ptr,
    ids_ptr,
    found_ptr,
    tiles,
    columns_ptr,
    counts_ptr,
    row_stride,
    drawn_ptr,
    sizes_ptr,
    kept_columns_ptr,
    kept_counts_ptr,
    most,
    MASS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Truncate one row's distribution, and draw one of the kept columns."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if draws(temperatures_ptr, rules_ptr, slot):
        parts = tl.arange(0, TILES)
        size = tl.sum(tl.load(found_ptr + row * tiles + parts, mask=parts < tiles, other=0), 0)
        row_columns_ptr = columns_ptr + row * row_stride
        row_counts_ptr = counts_ptr + row * row_stride
        number, total = _at_least(row_counts_ptr, size, 1, BLOCK)
        wanted = total * MASS
        low = tl.full((), 1, tl.int32)
        high = tl.full((), _MAX_COUNT, tl.int32)
        while low < high:
            # The largest edge at which the mass is reached.
            middle = (low + high + 1) // 2
            number, mass = _at_least(row_counts_ptr, size, middle, BLOCK)
            low = tl.where(mass >= wanted, middle, low).to(tl.int32)
            high = tl.where(mass >= wanted, high, middle - 1).to(tl.int32)
        above, mass_above = _at_least(row_counts_ptr, size, low + 1, BLOCK)
        more = tl.ceil((wanted - mass_above) / low.to(tl.float64)).to(tl.int32)
        kept = above + tl.maximum(more, 1)
        if kept > most:
            kept = tl.zeros_like(kept) + most
            high = tl.full((), _MAX_COUNT, tl.int32)
            while low < high:
                # The largest edge at which there are as many.
                middle = (low + high + 1) // 2
                number, mass = _at_least(row_counts_ptr, size, middle, BLOCK)
                low = tl.where(number >= kept, middle, low).to(tl.int32)
                high = tl.where(number >= kept, high, middle - 1).to(tl.int32)
            above, mass_above = _at_least(row_counts_ptr, size, low + 1, BLOCK)
        key = noise_key(stream_keys_ptr, slot, _DRAFT, tl.load(positions_ptr + row))
        ties = tl.full((), 0, tl.int32)
        written = tl.full((), 0, tl.int32)
        best = tl.full((), float("-inf"), tl.float64)
        winner = tl.full((), 0, tl.int32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            counts = tl.load(row_counts_ptr + at, mask=at < size, other=0)
            columns = tl.load(row_columns_ptr + at, mask=at < size, other=0)
            tied = counts == low
            rank = ties + tl.cumsum(tied.to(tl.int32), axis=0)
            inside = (counts > low) | (tied & (rank <= kept - above))
            places = row * most + written + tl.cumsum(inside.to(tl.int32), axis=0) - 1
            tl.store(kept_columns_ptr + places, columns, mask=inside)
            tl.store(kept_counts_ptr + places, counts, mask=inside)
            ids = tl.load(ids_ptr + columns, mask=inside, other=0).to(tl.int32)
            logs = tl.log(tl.where(inside, counts, 1).to(tl.float64))
            scores = tl.where(inside, logs + gumbel(noise_bits(key, ids)), float("-inf"))
            top = tl.max(scores, 0)
            here = tl.min(tl.where((scores == top) & inside, columns, _NO_COLUMN), 0)
            winner = tl.where(top > best, here, winner).to(tl.int32)
            best = tl.maximum(best, top)
            ties += tl.sum(tied.to(tl.int32), 0)
            written += tl.sum(inside.to(tl.int32), 0)
        tl.store(drawn_ptr + row, winner)
        tl.store(sizes_ptr + row, written)
