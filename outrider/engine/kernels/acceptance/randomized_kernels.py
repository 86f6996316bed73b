# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Triton kernels behind `outrider.engine.kernels.acceptance.randomized`, in the order of a launch.

1. Compute partial log-sum-exps of all rows of sessions with random acceptance; one program per
   tile.
2. Find the accepted path of each session; one program per session. It compares tokens, draws random
   numbers, and computes residuals on the ids of the draft distribution.
3. Sample from the residual target distribution after a rejection; one program per tile. Programs
   of sessions without a rejection do nothing.
4. Make the column with the largest perturbed score of all tiles the last token.

Shape suffixes are those of `outrider.engine.kernels.acceptance.randomized`. P is the number of
tiles of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.engine.kernels.acceptance.matching import (
    INVALID_OUTPUT,
    RESAMPLED,
    TARGET_ONLY_FALLBACK,
    load_parents,
)
from outrider.engine.kernels.acceptance.residual import (
    find_entry,
    finish_residual,
    reject_entry,
    start_residual,
)
from outrider.engine.kernels.noise import (
    best_of,
    best_perturbed,
    noise_bits,
    noise_key,
    uniform,
)
from outrider.engine.kernels.sampling import scaled_tile
from outrider.engine.kernels.session_tensors import RULE_REJECTION, RULE_TARGET_ONLY
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream

_ACCEPT = tl.constexpr(int(NoiseStream.ACCEPT))
_RECOVER = tl.constexpr(int(NoiseStream.RECOVER))
_SHARED_DRAW_ID = tl.constexpr(SHARED_DRAW_ID)
_TARGET_ONLY = tl.constexpr(RULE_TARGET_ONLY)
_REJECTION = tl.constexpr(RULE_REJECTION)

NO_DISTRIBUTION, SPARSE_DISTRIBUTION, DENSE_DISTRIBUTION = 0, 1, 2
"""Kinds of draft distribution."""
_NO_DISTRIBUTION = tl.constexpr(NO_DISTRIBUTION)
_SPARSE = tl.constexpr(SPARSE_DISTRIBUTION)
_DENSE = tl.constexpr(DENSE_DISTRIBUTION)

_UNCHANGED = tl.constexpr(0)
_WITHOUT_CHILDREN = tl.constexpr(1)
_RESIDUAL = tl.constexpr(2)
_AFRESH = tl.constexpr(3)
"""Kinds of change of the target distribution at the last accepted node. _AFRESH means no change,
but scores above HUGE_SCORE: `choose_tokens` loses their noise to rounding, so the bonus token is
drawn again from log-probabilities."""

HUGE_SCORE = 2.0**30
"""A score above this value loses part of its Gumbel noise to rounding when the two are added."""
_HUGE_SCORE = tl.constexpr(HUGE_SCORE)
_HAS_RESAMPLED = tl.constexpr(RESAMPLED)
_HAS_FALLBACK = tl.constexpr(TARGET_ONLY_FALLBACK)
_HAS_INVALID_OUTPUT = tl.constexpr(INVALID_OUTPUT)


@triton.jit
def _draws_randomly(temperature, rule):
    return (temperature > 0.0) & ((rule == _TARGET_ONLY) | (rule == _REJECTION))


@triton.jit
def sum_tiles(
    logits_ptr,
    logits_stride,
    num_columns,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    maxima_ptr,
    sums_ptr,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
    REJECTION_ONLY: tl.constexpr = False,
):
    """Store the maximum score m of one tile of a row, and the sum of exp(score - m).

    Only rows of sessions with random acceptance (rejection or target-only rule) are processed; with
    REJECTION_ONLY, only those with the rejection rule.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row // NODES)
    temperature, rule = tl.load(temperatures_ptr + slot), tl.load(rules_ptr + slot)
    asked = _draws_randomly(temperature, rule)
    if REJECTION_ONLY:
        asked &= rule == _REJECTION
    if asked:
        columns = part * TILE + tl.arange(0, TILE)
        valid = columns < num_columns
        scores = scaled_tile(logits_ptr + row * logits_stride, columns, valid, temperature)
        top = tl.max(scores, 0)
        shift = tl.where(top > float("-inf"), top, 0.0)
        where = row * tl.num_programs(1) + part
        tl.store(maxima_ptr + where, top)
        tl.store(sums_ptr + where, tl.sum(tl.exp(scores - shift), 0))


@triton.jit
def logsumexp(maxima_ptr, sums_ptr, row, tiles, TILES: tl.constexpr):
    """Return the maximum score m of a row and log(sum(exp(score - m))), both float64.

    The two are returned separately: if m is 1e30, their float64 sum rounds to m. Returns (0, 0) if
    the row has no finite score.
    """
    parts = tl.arange(0, TILES)
    valid = parts < tiles
    maxima = tl.load(maxima_ptr + row * tiles + parts, mask=valid, other=float("-inf"))
    sums = tl.load(sums_ptr + row * tiles + parts, mask=valid, other=0.0)
    top = tl.max(maxima, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum((sums * tl.exp(maxima - shift)).to(tl.float64), 0)
    return shift.to(tl.float64), tl.log(tl.where(total > 0.0, total, 1.0))


@triton.jit
def _next_child(above, there, rows, node, after, NODES: tl.constexpr):
    """Return the first child of `node` after row `after`; NODES if there is none."""
    return tl.min(tl.where(there & (above == node) & (rows > after), rows, NODES), 0)


@triton.jit
def walk(
    logits_ptr,
    logits_stride,
    num_columns,
    chosen_ptr,
    tokens_ptr,
    parents_ptr,
    stream_keys_ptr,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    positions_ptr,
    maxima_ptr,
    sums_ptr,
    tiles,
    ids_ptr,
    distribution_counts_ptr,
    ranges_ptr,
    ranges_stride,
    range_stride,
    inside_ptr,
    draft_ptr,
    probs_ptr,
    probs_slot_stride,
    probs_step_stride,
    draft_columns_ptr,
    counts_ptr,
    rows_ptr,
    emitted_ptr,
    flags_ptr,
    modes_ptr,
    nodes_ptr,
    tops_ptr,
    logs_ptr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    CHAIN: tl.constexpr,
    DISTRIBUTION: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Find the accepted path of one session. The outer loop follows the path from the root; the
    inner loop tries the children of the last accepted node."""
    batch = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    first = batch * NODES
    drafted = tl.load(tokens_ptr + first + rows, mask=rows < NODES, other=-1)
    exists = (rows > 0) & (rows < NODES) & (drafted >= 0)
    there = exists & (drafted < num_columns)
    above = load_parents(parents_ptr, batch, rows, NODES, CHAIN)
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot)
    rule = tl.load(rules_ptr + slot)
    by_coins = _draws_randomly(temperature, rule)
    by_distribution = by_coins & (rule == _REJECTION)
    if DISTRIBUTION == _NO_DISTRIBUTION:
        by_distribution = by_coins & (rule < 0)
    if DISTRIBUTION == _SPARSE:
        begins_ptr = ranges_ptr + batch * ranges_stride + rows * range_stride
        begins = tl.load(begins_ptr, mask=rows < NODES, other=0)
        ends = tl.load(begins_ptr + 1, mask=rows < NODES, other=0)
        by_distribution = by_distribution & (tl.max((ends > begins).to(tl.int32), 0) != 0)
    any_draft = tl.max(exists.to(tl.int32), 0) != 0
    fallback = (by_coins & (rule == _REJECTION) & (by_distribution == 0) & any_draft).to(tl.int32)
    path, emitted = rows, tl.full((BLOCK,), -1, tl.int32)
    count = tl.full((), 0, tl.int32)
    node = tl.full((), 0, tl.int32)
    winner = tl.full((), 0, tl.int32)
    mode = tl.full((), 0, tl.int32)
    top = tl.full((), 0.0, tl.float64)
    log_sum = tl.full((), 0.0, tl.float64)
    while winner < NODES:
        node = winner
        count += 1
        path = tl.where(rows == count - 1, node, path)
        row_ptr = logits_ptr + (first + node).to(tl.int64) * logits_stride
        wanted = tl.load(chosen_ptr + first + node)
        key = noise_key(stream_keys_ptr, slot, _ACCEPT, tl.load(positions_ptr + first + node))
        if by_coins:
            here = (first + node).to(tl.int64)
            top, log_sum = logsumexp(maxima_ptr, sums_ptr, here, tiles, TILES)
        shared_coin = uniform(noise_bits(key, tl.full((), _SHARED_DRAW_ID, tl.int32)))
        begin = tl.full((), 0, tl.int32)
        end = tl.full((), 0, tl.int32)
        if DISTRIBUTION == _SPARSE:
            range_ptr = ranges_ptr + batch * ranges_stride + node * range_stride
            begin = tl.load(range_ptr)
            end = tl.load(range_ptr + 1)
        mode = tl.full((), 0, tl.int32)
        mass = tl.full((), 0.0, tl.float64)
        outside = tl.full((), 1.0, tl.float64)
        rest = tl.full((), 0.0, tl.float64)
        exhausted = tl.full((), 0, tl.int32)
        winner = tl.full((), NODES, tl.int32)
        row = _next_child(above, there, rows, node, 0, NODES)
        # Below a row without a finite logit nothing stands.
        row = tl.where(wanted < 0, NODES, row).to(tl.int32)
        while row < NODES:
            token = tl.load(tokens_ptr + first + row)
            stands = token == wanted
            if by_coins:
                score = scaled_tile(row_ptr, token, token < num_columns, temperature)
                prob = tl.exp((score.to(tl.float64) - top) - log_sum)
                coin = uniform(noise_bits(key, token))
                stands = coin < 0.0
                judged_by_distribution = by_distribution
                if DISTRIBUTION == _DENSE:
                    # A distribution that does not have the token it is said to have given is no
                    # distribution.
                    column = tl.load(draft_columns_ptr + token)
                    distribution_ptr = (
                        probs_ptr + slot * probs_slot_stride + node * probs_step_stride
                    )
                    weight = tl.load(distribution_ptr + column, mask=column >= 0, other=1.0)
                    is_distribution = (weight > 0.0) & (weight < float("inf"))
                    fallback = tl.where(by_distribution & (is_distribution == 0), 1, fallback).to(
                        tl.int32
                    )
                    judged_by_distribution = by_distribution & is_distribution
                if judged_by_distribution:
                    if DISTRIBUTION == _DENSE:
                        stands = (column >= 0) & (coin * weight.to(tl.float64) < prob)
                        mode = tl.where(column >= 0, _RESIDUAL, mode).to(tl.int32)
                    if DISTRIBUTION == _SPARSE:
                        place, total = find_entry(
                            ids_ptr, distribution_counts_ptr, begin, end, token, ENTRIES
                        )
                        if place >= 0:
                            if mode == _UNCHANGED:
                                weight = tl.load(distribution_counts_ptr + place).to(tl.float64)
                                stands = coin * weight < prob * total.to(tl.float64)
                            else:
                                left = tl.load(inside_ptr + place)
                                stands = coin * tl.load(draft_ptr + place) < left
                            if stands == 0:
                                if mode == _UNCHANGED:
                                    rest = start_residual(
                                        ids_ptr,
                                        distribution_counts_ptr,
                                        inside_ptr,
                                        draft_ptr,
                                        row_ptr,
                                        begin,
                                        end,
                                        total,
                                        temperature,
                                        top,
                                        log_sum,
                                        ENTRIES,
                                    )
                                    mode = tl.full((), _RESIDUAL, tl.int32)
                                outside = reject_entry(
                                    inside_ptr, draft_ptr, begin, end, place, rest, outside, ENTRIES
                                )
                                exhausted = (outside < 0.0).to(tl.int32)
                else:
                    earlier = there & (above == node) & (rows < row) & (drafted == token)
                    seen = tl.max(earlier.to(tl.int32), 0)
                    mass += tl.where(seen == 0, prob, 0.0)
                    stands = shared_coin < mass
                    mode = tl.full((), _WITHOUT_CHILDREN, tl.int32)
            winner = tl.where(stands, row, winner).to(tl.int32)
            over = stands | (exhausted != 0)
            row = tl.where(over, NODES, _next_child(above, there, rows, node, row, NODES))
            row = row.to(tl.int32)
        mode = tl.where(exhausted != 0, _UNCHANGED, mode).to(tl.int32)
        if DISTRIBUTION == _SPARSE:  # noqa: SIM102 (a constexpr)
            if (winner == NODES) & by_distribution & (mode == _RESIDUAL):
                finish_residual(inside_ptr, begin, end, outside, ENTRIES)
        taken = tl.sum(tl.where(rows == winner, drafted, 0), 0)
        emitted = tl.where((rows == count - 1) & (winner < NODES), taken, emitted)
    final = tl.load(chosen_ptr + first + node)
    emitted = tl.where(rows == count - 1, tl.maximum(final, 0), emitted)
    tl.store(counts_ptr + batch, count)
    tl.store(rows_ptr + first + rows, path, mask=rows < NODES)
    tl.store(emitted_ptr + first + rows, emitted, mask=rows < NODES)
    resampled = tl.max((exists & (above == node)).to(tl.int32), 0)
    flags = resampled * _HAS_RESAMPLED + fallback * _HAS_FALLBACK
    flags += (final < 0).to(tl.int32) * _HAS_INVALID_OUTPUT
    tl.store(flags_ptr + batch, flags)
    huge = by_coins & (top > _HUGE_SCORE) & (mode == _UNCHANGED) & (final >= 0)
    tl.store(modes_ptr + batch, tl.where(huge, _AFRESH, mode).to(tl.int32))
    tl.store(nodes_ptr + batch, node)
    tl.store(tops_ptr + batch, top.to(tl.float32))
    tl.store(logs_ptr + batch, log_sum.to(tl.float32))


@triton.jit
def draw_in_tile(
    logits_ptr,
    logits_stride,
    num_columns,
    tokens_ptr,
    parents_ptr,
    stream_keys_ptr,
    temperatures_ptr,
    slots_ptr,
    positions_ptr,
    ids_ptr,
    ranges_ptr,
    ranges_stride,
    range_stride,
    inside_ptr,
    probs_ptr,
    probs_slot_stride,
    probs_step_stride,
    draft_columns_ptr,
    modes_ptr,
    nodes_ptr,
    tops_ptr,
    logs_ptr,
    scores_ptr,
    winners_ptr,
    NODES: tl.constexpr,
    CHAIN: tl.constexpr,
    DISTRIBUTION: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the largest Gumbel-perturbed score of one tile of columns, and its column, for sessions
    whose last token must be drawn again.

    The scores are log-probabilities of the residual distribution: the part of the target
    distribution at the last accepted node that remains after rejections.
    """
    batch = tl.program_id(0)
    part = tl.program_id(1)
    mode = tl.load(modes_ptr + batch)
    if mode != _UNCHANGED:
        first = batch * NODES
        node = tl.load(nodes_ptr + batch)
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        columns = part * TILE + tl.arange(0, TILE)
        valid = columns < num_columns
        row_ptr = logits_ptr + (first + node).to(tl.int64) * logits_stride
        scores = scaled_tile(row_ptr, columns, valid, tl.load(temperatures_ptr + slot))
        scores = (scores - tl.load(tops_ptr + batch)) - tl.load(logs_ptr + batch)
        if mode == _WITHOUT_CHILDREN:
            for row in range(1, NODES):
                parent = load_parents(parents_ptr, batch, row, NODES, CHAIN)
                token = tl.load(tokens_ptr + first + row)
                scores = tl.where((parent == node) & (columns == token), float("-inf"), scores)
        if DISTRIBUTION == _DENSE:  # noqa: SIM102 (a constexpr)
            if mode == _RESIDUAL:
                places = tl.load(draft_columns_ptr + columns, mask=valid, other=-1)
                distribution_ptr = probs_ptr + slot * probs_slot_stride + node * probs_step_stride
                left = tl.exp(scores) - tl.load(
                    distribution_ptr + places, mask=places >= 0, other=0.0
                )
                scores = tl.where(
                    left > 0.0, tl.log(tl.where(left > 0.0, left, 1.0)), float("-inf")
                )
        if DISTRIBUTION == _SPARSE:  # noqa: SIM102 (a constexpr)
            if mode == _RESIDUAL:
                range_ptr = ranges_ptr + batch * ranges_stride + node * range_stride
                end = tl.load(range_ptr + 1)
                low = tl.load(range_ptr) + tl.zeros_like(columns)
                high = end + tl.zeros_like(columns)
                for _ in range(SEARCH_STEPS):
                    middle = (low + high) // 2
                    smaller = tl.load(ids_ptr + middle, mask=low < high, other=0) < columns
                    high = tl.where((low < high) & (smaller == 0), middle, high)
                    low = tl.where((low < high) & smaller, middle + 1, low)
                found = (low < end) & valid
                found = found & (tl.load(ids_ptr + low, mask=found, other=-1) == columns)
                changed = tl.load(inside_ptr + low, mask=found, other=0.0).to(tl.float32)
                scores = tl.where(found, changed, scores)
        position = tl.load(positions_ptr + first + node)
        key = noise_key(stream_keys_ptr, slot, _RECOVER, position)
        best, winner = best_perturbed(scores, columns, valid, key, ids_ptr, False)
        where = batch.to(tl.int64) * tl.num_programs(1) + part
        tl.store(scores_ptr + where, best)
        tl.store(winners_ptr + where, winner)


@triton.jit
def put_drawn(
    modes_ptr,
    scores_ptr,
    winners_ptr,
    counts_ptr,
    emitted_ptr,
    tiles,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the column with the largest perturbed score of all tiles the last token of a session. If
    the residual distribution is empty, the last token stays."""
    batch = tl.program_id(0)
    if tl.load(modes_ptr + batch) != _UNCHANGED:
        parts = tl.arange(0, BLOCK)
        valid = parts < tiles
        where = batch.to(tl.int64) * tiles + parts
        scores = tl.load(scores_ptr + where, mask=valid, other=float("-inf"))
        winners = tl.load(winners_ptr + where, mask=valid, other=0)
        best, winner = best_of(scores, winners, valid)
        last = batch * NODES + tl.load(counts_ptr + batch) - 1
        tl.store(emitted_ptr + last, winner, mask=best > float("-inf"))
