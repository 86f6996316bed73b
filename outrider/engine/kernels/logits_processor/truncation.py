# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Kernels of top-k, top-p and min-p truncation, exact to the bit.

The logits processor (`outrider.engine.kernels.logits_processor.process`) runs them after
`penalties`. Three terms: the peak of a row is its largest score, the edge is the lowest score that
truncation keeps, and the distance of a score is peak - score.

1. `bracket_sums` runs twice. It sums, in float32, the unnormalised probability (for top-k: the
   number) of all ids up to each of 15 distances from the peak, and then up to each of 15 distances
   near the edge. The sums give an interval, the bracket, that contains the edge, with a margin for
   rounding.
2. `collect_candidates` computes the exact integer probability mass above the bracket, and collects
   the scores inside it.
3. `find_threshold` finds the edge among these scores, by a 16-way search over integers that sort
   like the scores.
4. `cutoff_mask.finish` sets logits with scores below the edge to -inf.

Programs for rows without truncation return immediately. P is the number of tiles of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.sampling import scaled_tile
from outrider.engine.kernels.session_tensors import PROCESS_TRUNCATION
from outrider.engine.logits_processor import MAX_LOGIT, MIN_TEMPERATURE
from outrider.engine.truncation import EXP2_POLYNOMIAL, MAX_DISTANCE, STEP_BITS, STEPS_PER_NAT

NUM_BRACKET_SUMS = 16
"""Number of sums that `bracket_sums` stores per tile: one up to each of 15 distances, and one over
all ids."""
_GUIDES = tl.constexpr(NUM_BRACKET_SUMS)
_CUTS = tl.constexpr(PROCESS_TRUNCATION)
_MAX_LOGIT = tl.constexpr(MAX_LOGIT)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_LAST_INT32 = tl.constexpr(2**31 - 1)
_FAR = tl.constexpr(3.0e38)
"""A distance larger than all finite ones."""
_REACH = tl.constexpr(24.0)
"""Largest finite distance in the first run of `bracket_sums`, in nats. Ids beyond it only matter
for a top_p near 1."""
_STRIDE = tl.constexpr(8.0)
"""Step between the distances in the second run of `bracket_sums`, in nats, if the first run found
no upper end of the bracket."""
_ERROR = tl.constexpr(5e-5)
"""Upper bound of the relative difference between the float sums and the integer masses."""
_MARGIN = tl.constexpr(1e-4)
_SCORE_ERROR = tl.constexpr(2.0**-21)
"""Upper bound of the absolute error of a distance in `bracket_sums`, as a multiple of |peak|."""
_FARTHEST = tl.constexpr(MAX_DISTANCE)
_STEPS_PER_NAT = tl.constexpr(STEPS_PER_NAT)
_STEP_BITS = tl.constexpr(STEP_BITS)
_LAST_STEP = tl.constexpr(2**STEP_BITS - 1)
_C0 = tl.constexpr(EXP2_POLYNOMIAL[0])
_C1 = tl.constexpr(EXP2_POLYNOMIAL[1])
_C2 = tl.constexpr(EXP2_POLYNOMIAL[2])
_C3 = tl.constexpr(EXP2_POLYNOMIAL[3])
_C4 = tl.constexpr(EXP2_POLYNOMIAL[4])
_C5 = tl.constexpr(EXP2_POLYNOMIAL[5])
_NO_KEY = tl.constexpr(-(2**40))


@triton.jit
def peak_of(maxima_ptr, row, tiles, TILES: tl.constexpr):
    """Return the largest logit of a row, given the maximum of each of its tiles."""
    parts = tl.arange(0, TILES)
    maxima = tl.load(maxima_ptr + row * tiles + parts, mask=parts < tiles, other=float("-inf"))
    return tl.max(maxima, 0)


@triton.jit
def score_of(logit, temperature):
    """Return the score of a logit, computed as in `scaled_tile`."""
    return tl.div_rn(logit, tl.maximum(temperature, _MIN_TEMPERATURE))


@triton.jit
def _searches(flags, top_k, top_p):
    return ((flags & _CUTS) != 0) & ((top_k > 0) | (top_p < 1.0))


@triton.jit
def _totals(guides_ptr, row, tiles, TILES: tl.constexpr):
    """Add up the sums that `bracket_sums` stored for the tiles of a row, float32
    [NUM_BRACKET_SUMS]."""
    parts = tl.arange(0, TILES)[:, None]
    which = tl.arange(0, _GUIDES)[None, :]
    where = (row * tiles + parts) * _GUIDES + which
    return tl.sum(tl.load(guides_ptr + where, mask=parts < tiles, other=0.0), 0)


@triton.jit
def _distances_of(low, high, LEVEL: tl.constexpr):
    """Return the distances up to which `bracket_sums` sums, in ascending order. The last one
    includes all ids."""
    which = tl.arange(0, _GUIDES)
    steps = (which + 1).to(tl.float32)
    if LEVEL == 0:
        distances = steps * steps * (_REACH / 225.0)
    else:
        width = tl.where(high < _FAR, (high - low) * 0.0625, _STRIDE)
        distances = low + steps * width
    return tl.where(which == _GUIDES - 1, _FAR, distances)


@triton.jit
def _narrowed(totals, distances, need, error, low, high):
    """Return the bracket (low, high] of the edge's distance, narrowed by the sums `totals` up to
    each of `distances`. `need` is the sum that the kept ids must reach."""
    below = (totals < need * (1.0 - error)) & (distances < _FAR)
    enough = totals >= need * (1.0 + error)
    low = tl.maximum(low, tl.max(tl.where(below, distances, 0.0), 0))
    high = tl.minimum(high, tl.min(tl.where(enough, distances, _FAR), 0))
    return low, high


@triton.jit
def bracket_sums(
    logits_ptr,
    logits_stride,
    num_columns,
    flags_ptr,
    temperatures_ptr,
    slots_ptr,
    top_ks_ptr,
    top_ps_ptr,
    maxima_ptr,
    above_ptr,
    guides_ptr,
    brackets_ptr,
    rows_per_slot,
    LEVEL: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store the sums of one tile of one row up to each distance. LEVEL: 0 for the first run, 1 for
    the second one. `above_ptr`: the sums of the first run."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.num_programs(1)
    slot = tl.load(slots_ptr + row // rows_per_slot)
    top_k, top_p = tl.load(top_ks_ptr + slot), tl.load(top_ps_ptr + slot)
    if _searches(tl.load(flags_ptr + slot), top_k, top_p):
        temperature = tl.load(temperatures_ptr + slot)
        peak = peak_of(maxima_ptr, row, tiles, TILES)
        if peak > float("-inf"):
            low = tl.full((), 0.0, tl.float32)
            high = tl.full((), 0.0, tl.float32) + _FAR
            if LEVEL == 1:
                totals = _totals(above_ptr, row, tiles, TILES)
                distances = _distances_of(low, high, 0)
                total = tl.max(totals, 0)
                need = tl.where(top_k > 0, top_k.to(tl.float32), top_p.to(tl.float32) * total)
                error = _ERROR + tl.abs(score_of(peak, temperature)) * _SCORE_ERROR
                low, high = _narrowed(totals, distances, need, error, low, high)
                if part == 0:
                    tl.store(brackets_ptr + 3 * row, low)
                    tl.store(brackets_ptr + 3 * row + 1, high)
                    tl.store(brackets_ptr + 3 * row + 2, need)
            bounds = _distances_of(low, high, LEVEL)
            scale = 1.0 / tl.maximum(temperature, _MIN_TEMPERATURE)
            which = tl.arange(0, _GUIDES)
            where = (row * tiles + part) * _GUIDES + which
            sums = tl.zeros((_GUIDES,), tl.float32)
            near = True
            if LEVEL == 1:
                # Most tiles have nothing within the bracket; what is beyond it was summed before.
                nearest = (peak - tl.load(maxima_ptr + row * tiles + part)) * scale
                near = nearest <= tl.max(tl.where(which == _GUIDES - 1, 0.0, bounds), 0)
            if near:
                columns = part * TILE + tl.arange(0, TILE)
                valid = columns < num_columns
                logits_ptr += row * logits_stride
                values = tl.load(logits_ptr + columns, mask=valid, other=float("-inf"))
                values = tl.where(values > _MAX_LOGIT, _MAX_LOGIT, values)
                reach = (peak - values) * scale
                weights = tl.where(top_k > 0, 1.0, tl.exp(-reach))
                inside = reach[None, :] <= bounds[:, None]
                sums = tl.sum(tl.where(inside, weights[None, :], 0.0), 1)
            tl.store(guides_ptr + where, sums)


@triton.jit
def _masses(distances):
    """Compute `outrider.engine.truncation.probability_masses`, int64."""
    bounded = tl.minimum(tl.maximum(distances, 0.0), _FARTHEST)
    steps = (bounded * _STEPS_PER_NAT).to(tl.int32).to(tl.int64)
    fractions = steps & _LAST_STEP
    mass = ((fractions * _C5) >> _STEP_BITS) + _C4
    mass = ((fractions * mass) >> _STEP_BITS) + _C3
    mass = ((fractions * mass) >> _STEP_BITS) + _C2
    mass = ((fractions * mass) >> _STEP_BITS) + _C1
    mass = ((fractions * mass) >> _STEP_BITS) + _C0
    return mass >> tl.minimum(steps >> _STEP_BITS, 62)


@triton.jit
def collect_candidates(
    logits_ptr,
    logits_stride,
    num_columns,
    flags_ptr,
    temperatures_ptr,
    slots_ptr,
    top_ks_ptr,
    top_ps_ptr,
    maxima_ptr,
    guides_ptr,
    brackets_ptr,
    sums_ptr,
    candidates_ptr,
    found_ptr,
    rows_per_slot,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store the probability mass of one tile of one row, in total and above the bracket, and append
    the scores inside the bracket to the row's list of candidates.

    With top-k, no mass is stored, and scores above the bracket are appended as well, because top-p
    then computes the mass of the kept scores.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.num_programs(1)
    slot = tl.load(slots_ptr + row // rows_per_slot)
    top_k, top_p = tl.load(top_ks_ptr + slot), tl.load(top_ps_ptr + slot)
    if _searches(tl.load(flags_ptr + slot), top_k, top_p):
        temperature = tl.load(temperatures_ptr + slot)
        peak = peak_of(maxima_ptr, row, tiles, TILES)
        if peak > float("-inf"):
            peak = score_of(peak, temperature)
            slack = tl.abs(peak) * _SCORE_ERROR
            low = tl.load(brackets_ptr + 3 * row)
            high = tl.load(brackets_ptr + 3 * row + 1)
            need = tl.load(brackets_ptr + 3 * row + 2)
            bounds = _distances_of(low, high, 1)
            totals = _totals(guides_ptr, row, tiles, TILES)
            low, high = _narrowed(totals, bounds, need, _ERROR + slack, low, high)
            low -= _MARGIN + slack + low * 1e-5
            high = tl.where(high < _FAR, high + _MARGIN + slack + high * 1e-5, _FAR)
            columns = part * TILE + tl.arange(0, TILE)
            valid = columns < num_columns
            scores = scaled_tile(logits_ptr + row * logits_stride, columns, valid, temperature)
            distances = peak - scores
            above = (distances < low) & (top_k == 0)
            if top_k == 0:
                masses = _masses(distances)
                where = (row * tiles + part) * 2
                tl.store(sums_ptr + where, tl.sum(masses, 0))
                tl.store(sums_ptr + where + 1, tl.sum(tl.where(above, masses, 0), 0))
            joins = (scores > float("-inf")) & (distances <= high) & (above == 0)
            count = tl.sum(joins.to(tl.int32), 0)
            if count > 0:
                places = tl.cumsum(joins.to(tl.int32), axis=0)
                first = tl.atomic_add(found_ptr + row, count)
                tl.store(candidates_ptr + row * num_columns + first + places - 1, scores, joins)


@triton.jit
def _key(scores):
    """Map float32 scores, without NaN, to int64 keys of the same order."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _LAST_INT32)).to(tl.int64)


@triton.jit
def _of_key(key):
    """Map a key from `_key` back to its score."""
    order = key.to(tl.int32)
    return (order ^ ((order >> 31) & _LAST_INT32)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(scores, inside, peak, floor, BY_COUNT: tl.constexpr):
    """Return the keys of candidate scores and their weights, both int64. The weight is 0 for keys
    below `floor`. Otherwise it is 1 if BY_COUNT is set, else the probability mass of the score."""
    keys = _key(scores)
    weights = tl.zeros_like(keys) + 1
    if not BY_COUNT:
        weights = _masses(peak - scores)
    return keys, tl.where(inside & (keys >= floor), weights, 0)


@triton.jit
def _edge(
    candidates_ptr,
    count,
    need,
    base,
    peak,
    floor,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the lowest key, at least `floor`, such that `base` plus the weight of all candidates
    with higher keys is less than `need`."""
    high = _key(peak)
    low = high
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        scores = tl.load(candidates_ptr + index, mask=index < count, other=_FAR)
        low = tl.minimum(low, tl.min(_key(scores), 0))
    low = tl.maximum(low, floor)
    ways = tl.arange(0, _GUIDES).to(tl.int64)
    while low < high:
        pivots = low + (high - low) * ways // _GUIDES
        sums = tl.zeros((_GUIDES,), tl.int64) + base
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < count
            scores = tl.load(candidates_ptr + index, mask=inside, other=0.0)
            keys, weights = _weigh(scores, inside, peak, floor, BY_COUNT)
            over = keys[None, :] > pivots[:, None]
            sums += tl.sum(tl.where(over, weights[None, :], 0), 1)
        enough = sums < need
        new_high = tl.min(tl.where(enough, pivots, high), 0)
        low = tl.max(tl.where(enough, low, pivots + 1), 0)
        high = new_high
    return high


@triton.jit
def find_threshold(
    num_columns,
    flags_ptr,
    temperatures_ptr,
    slots_ptr,
    top_ks_ptr,
    top_ps_ptr,
    floors_ptr,
    maxima_ptr,
    sums_ptr,
    candidates_ptr,
    found_ptr,
    lowest_ptr,
    tiles,
    rows_per_slot,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the lowest score of one row that top-k, top-p and min-p keep."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row // rows_per_slot)
    if (tl.load(flags_ptr + slot) & _CUTS) != 0:
        peak = score_of(peak_of(maxima_ptr, row, tiles, TILES), tl.load(temperatures_ptr + slot))
        top_k = tl.load(top_ks_ptr + slot)
        top_p = tl.load(top_ps_ptr + slot)
        lowest = peak + tl.load(floors_ptr + slot)
        candidates_ptr += row * num_columns
        floor = tl.full((), 0, tl.int64) + _NO_KEY
        if (peak > float("-inf")) & ((top_k > 0) | (top_p < 1.0)):
            count = tl.load(found_ptr + row)
            parts = tl.arange(0, TILES)
            where = sums_ptr + (row * tiles + parts) * 2
            none = tl.full((), 0, tl.int64)
            # Under top-k nobody wrote these sums.
            total = tl.sum(tl.load(where, mask=parts < tiles, other=0), 0)
            total = tl.where(top_k > 0, none, total)
            base = tl.sum(tl.load(where + 1, mask=parts < tiles, other=0), 0)
            base = tl.where(top_k > 0, none, base)
            if top_k > 0:
                floor = _edge(
                    candidates_ptr, count, top_k.to(tl.int64), none, peak, floor, True, BLOCK
                )
                lowest = tl.maximum(lowest, _of_key(floor))
                if top_p < 1.0:
                    for start in range(0, count, BLOCK):
                        index = start + tl.arange(0, BLOCK)
                        inside = index < count
                        scores = tl.load(candidates_ptr + index, mask=inside, other=0.0)
                        _, weights = _weigh(scores, inside, peak, floor, False)
                        total += tl.sum(weights, 0)
            if top_p < 1.0:
                need = tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)
                edge = _edge(candidates_ptr, count, need, base, peak, floor, False, BLOCK)
                lowest = tl.maximum(lowest, _of_key(edge))
        tl.store(lowest_ptr + row, lowest)
