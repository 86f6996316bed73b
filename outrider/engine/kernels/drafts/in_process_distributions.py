# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Draft distributions of the in-process drafter's chains, indexed by session slot.

Only the rejection rule needs them. Programs for rows of other sessions return immediately.

Shapes: R rows, X session slots, K draft length, V draft vocabulary size, P tiles of a row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.acceptance.randomized_kernels import HUGE_SCORE, logsumexp, sum_tiles
from outrider.engine.kernels.drafts.distribution_kernels import draws
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.sampling import (
    num_warps_for,
    scaled_scores,
    scaled_tile,
    tile_columns,
)
from outrider.engine.kernels.session_tensors import RULE_REJECTION, SamplingState

_HUGE_SCORE = tl.constexpr(HUGE_SCORE)


def write_distributions(
    distributions: Tensor, logits: Tensor, state: SamplingState, slots: Tensor, levels: Tensor | int
) -> None:
    """Store the draft distribution of one token of each session's chain, as `draft_probs` defines
    it.

    distributions: float32 [X, K, V]. Row r writes distributions[slots[r], levels[r]]. logits:
    float32 or bfloat16 [R, V], columns contiguous, the logits from which `choose_tokens` drew the
    token. slots: int32 [R], session slots. levels: int32 [R], the index of the token in its chain,
    or one int for all rows. Rows of sessions without the rejection rule or with temperature 0 write
    nothing.
    """
    function = write_distributions_triton if logits.is_cuda else write_distributions_torch
    function(distributions, logits, state, slots, levels)


def draft_probs(logits: Tensor, state: SamplingState, slots: Tensor) -> Tensor:
    """Return the distributions from which `choose_tokens` draws, float32 [R, V]. Temperature 0
    counts as 1.

    A row is all zeros if its draw has no such distribution: either no score is finite, or several
    scores are so large that rounding loses their noise, so that the first one is always drawn.
    """
    heat = state.temperatures[slots.long()]
    scores = scaled_scores(logits, torch.where(heat > 0, heat, torch.ones_like(heat)))
    distribution, tops = scores.softmax(dim=-1), scores.amax(dim=-1)
    sound = (tops > -math.inf) & ((tops <= HUGE_SCORE) | (distribution.amax(dim=-1) == 1.0))
    return distribution.where(sound[:, None], 0.0)


def write_distributions_torch(
    distributions: Tensor, logits: Tensor, state: SamplingState, slots: Tensor, levels: Tensor | int
) -> None:
    """Compute `write_distributions` with PyTorch operators."""
    owners = slots.long()
    asked = (state.rules[owners] == RULE_REJECTION) & (state.temperatures[owners] > 0)
    rows = asked.nonzero()[:, 0]
    where = torch.as_tensor(levels, device=distributions.device).long().expand(len(owners))
    distributions[owners[rows], where[rows]] = draft_probs(logits[rows], state, slots[rows])


def write_distributions_triton(
    distributions: Tensor,
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    levels: Tensor | int,
    *,
    tile: int | None = None,
) -> None:
    """Compute `write_distributions` with Triton kernels. tile: number of columns per program, a
    power of two; None for a default that depends on the shape."""
    rows, columns = logits.shape
    if rows == 0:
        return
    tile = tile or tile_columns(rows, columns)
    tiles = cdiv(columns, tile)
    maxima, sums = torch.empty(2, rows, tiles, dtype=torch.float32, device=logits.device)
    shared = (logits, logits.stride(0), columns, state.temperatures, state.rules, slots)
    options = {"TILE": tile, "num_warps": num_warps_for(tile)}
    sum_tiles[(rows, tiles)](*shared, maxima, sums, NODES=1, REJECTION_ONLY=True, **options)
    by_row = isinstance(levels, Tensor)
    _put_tiles[(rows, tiles)](
        *shared,
        maxima,
        sums,
        distributions if by_row else distributions[:, levels],
        distributions.stride(0),
        distributions.stride(1),
        levels if by_row else None,
        BY_ROW=by_row,
        TILES=next_power_of_2(tiles),
        **options,
    )


@triton.jit
def _put_tiles(
    logits_ptr,
    logits_stride,
    num_columns,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    maxima_ptr,
    sums_ptr,
    distributions_ptr,
    slot_stride,
    level_stride,
    levels_ptr,
    BY_ROW: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store one tile of the distribution of a row, given the maxima and sums of `sum_tiles`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.num_programs(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if draws(temperatures_ptr, rules_ptr, slot):
        top, log_sum = logsumexp(maxima_ptr, sums_ptr, row, tiles, TILES)
        sound = (top <= _HUGE_SCORE) | (log_sum == 0.0)
        scale = tl.where(sound, tl.exp(-log_sum), 0.0).to(tl.float32)
        columns = part * TILE + tl.arange(0, TILE)
        inside = columns < num_columns
        temperature = tl.load(temperatures_ptr + slot)
        scores = scaled_tile(logits_ptr + row * logits_stride, columns, inside, temperature)
        distributions_ptr += slot * slot_stride
        if BY_ROW:
            distributions_ptr += tl.load(levels_ptr + row) * level_stride
        # Of a row without a score all is exp(-inf).
        tl.store(
            distributions_ptr + columns, tl.exp(scores - top.to(tl.float32)) * scale, mask=inside
        )
