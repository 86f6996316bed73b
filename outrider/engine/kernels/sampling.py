# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Token sampling from logits on the device, with the parameters of each session.

A token is the argmax of the logits for greedy sessions. For others, it is the argmax of score +
noise (the Gumbel-max trick), where score = logit / temperature, rounded to float32, and the noise
is float64 Gumbel noise from the session's seed. The result is the same as on the host
(`outrider.engine.noise` and `outrider.engine.logits_processor.plain_argmax`).

Shape suffixes: R rows, V columns of the logits, B sessions of the batch bucket, X session slots, P
tiles of a row.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.noise import best_of, best_perturbed, noise_key, row_keys
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.session_tensors import (
    RULE_COUPLED,
    RULE_GREEDY,
    RULE_REJECTION,
    RULE_TARGET_ONLY,
    SamplingState,
)
from outrider.engine.logits_processor import MAX_LOGIT, MIN_TEMPERATURE
from outrider.engine.noise import perturbed_argmax
from outrider.errors import InvalidRequestError
from outrider.spec.noise import NoiseStream

Side = Literal["target", "draft"]

_STREAMS: Final[dict[str, dict[int, int]]] = {
    "target": {
        RULE_GREEDY: 0,
        RULE_COUPLED: NoiseStream.TARGET,
        RULE_TARGET_ONLY: NoiseStream.RECOVER,
        RULE_REJECTION: NoiseStream.RECOVER,
    },
    "draft": {
        RULE_GREEDY: 0,
        RULE_COUPLED: NoiseStream.TARGET,
        RULE_TARGET_ONLY: 0,
        RULE_REJECTION: NoiseStream.DRAFT,
    },
}
"""Noise stream for each side and acceptance rule; 0 for an argmax without noise."""

_MAX_LOGIT = tl.constexpr(MAX_LOGIT)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


def choose_tokens(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    side: Side,
    ids: Tensor | None = None,
    num_columns: int | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    """Sample one token from each row of logits, and return its column, int32 [R].

    logits: float32 or bfloat16 [R, V], columns contiguous, rows of any stride. Row r belongs to the
    session in slot slots[r // rows_per_slot]; slots: int32 [B]. NaN counts as -inf; a row that is
    all NaN gives column 0. +inf is allowed. Of equal values, the one in the lowest column is
    chosen. positions: int32 [R], the absolute position of the sampled token.

    side: "target" draws tokens of coupled sessions with TARGET noise, and those of target-only and
    rejection sessions (their bonus tokens) with RECOVER noise. "draft" uses TARGET noise for
    coupled sessions, DRAFT noise for rejection sessions, and the argmax for target-only sessions.
    Sessions that are greedy or have temperature 0 use the argmax on both sides, and no noise is
    computed for them.

    ids: integer [V], the target id of each column, on which its noise depends; None if columns are
    target ids. num_columns: number of columns that can be chosen, if the last ones are padding;
    None for all. finite: int32 [R], the result of `find_finite_rows` for the model's unprocessed
    logits; rows for which it is 0 give -1. None to skip this check. Raises InvalidRequestError if R
    is not rows_per_slot * B.
    """
    if logits.shape[0] != rows_per_slot * slots.shape[0]:
        raise InvalidRequestError(
            f"{logits.shape[0]} rows of logits for {slots.shape[0]} slots of {rows_per_slot}",
            reason="KERNEL_SHAPES",
        )
    function = choose_tokens_triton if logits.is_cuda else choose_tokens_torch
    return function(
        logits,
        state,
        slots,
        positions,
        rows_per_slot=rows_per_slot,
        side=side,
        ids=ids,
        num_columns=num_columns,
        finite=finite,
    )


def choose_tokens_torch(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    side: Side,
    ids: Tensor | None = None,
    num_columns: int | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    """Compute `choose_tokens` with PyTorch operators."""
    columns = logits.shape[1] if num_columns is None else num_columns
    logits = logits[:, :columns].to(torch.float32)
    owners = slots.long().repeat_interleave(rows_per_slot)
    temperatures = state.temperatures[owners]
    streams = torch.zeros_like(owners)
    for rule, stream in _STREAMS[side].items():
        streams.masked_fill_(state.rules[owners] == rule, stream)
    chosen = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax(dim=-1)
    noisy = ((temperatures > 0) & (streams > 0)).nonzero()[:, 0]
    if len(noisy):
        stream_keys = state.stream_keys[owners[noisy], streams[noisy] - 1]
        keys = row_keys(stream_keys, positions[noisy])
        scores = scaled_scores(logits[noisy], temperatures[noisy])
        wanted = None if ids is None else ids[:columns].long()
        # A row without a finite score has no best column there (-1); here it has the first.
        chosen[noisy] = perturbed_argmax(scores, keys, wanted).clamp(min=0)
    if finite is not None:
        chosen = chosen.masked_fill(finite == 0, -1)
    return chosen.to(torch.int32)


def scaled_scores(logits_RV: Tensor, temperatures_R: Tensor) -> Tensor:
    """Return the scores, logits / temperature in float32, as the logits processor computes them.
    NaN becomes -inf, and logits are clamped to MAX_LOGIT before the division."""
    tamed = logits_RV.to(torch.float32)
    tamed = tamed.nan_to_num(nan=-math.inf, posinf=MAX_LOGIT, neginf=-math.inf)
    return tamed.clamp_(max=MAX_LOGIT) / temperatures_R.clamp(min=MIN_TEMPERATURE)[:, None]


def choose_tokens_triton(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    side: Side,
    ids: Tensor | None = None,
    num_columns: int | None = None,
    finite: Tensor | None = None,
    tile: int | None = None,
) -> Tensor:
    """Compute `choose_tokens` with Triton kernels. tile: number of columns per program, a power of
    two; None for a default that depends on the shape."""
    rows = logits.shape[0]
    columns = logits.shape[1] if num_columns is None else num_columns
    tile = tile or tile_columns(rows, columns)
    tiles = cdiv(columns, tile)
    scores = torch.empty(rows, tiles, dtype=torch.float64, device=logits.device)
    winners = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return chosen
    streams = _STREAMS[side]
    _choose_in_tile[(rows, tiles)](
        logits,
        logits.stride(0),
        columns,
        state.stream_keys,
        state.temperatures,
        state.rules,
        slots,
        positions,
        ids,
        scores,
        winners,
        rows_per_slot=rows_per_slot,
        COUPLED=RULE_COUPLED,
        TARGET_ONLY=RULE_TARGET_ONLY,
        REJECTION=RULE_REJECTION,
        COUPLED_STREAM=int(streams[RULE_COUPLED]),
        TARGET_ONLY_STREAM=int(streams[RULE_TARGET_ONLY]),
        REJECTION_STREAM=int(streams[RULE_REJECTION]),
        HAS_IDS=ids is not None,
        TILE=tile,
        num_warps=num_warps_for(tile),
    )
    block = next_power_of_2(tiles)
    _choose_among_tiles[(rows,)](
        scores,
        winners,
        finite,
        chosen,
        tiles,
        HAS_FINITE=finite is not None,
        BLOCK=block,
        num_warps=1,
    )
    return chosen


def tile_columns(rows: int, columns: int) -> int:
    """Return the number of columns per program: from 1024 to 4096, and small enough that the
    programs fill the device even if there are few rows."""
    tile = 1024
    while tile < 4096 and rows * cdiv(columns, 2 * tile) >= 256:
        tile *= 2
    return tile


def num_warps_for(tile: int) -> int:
    """Return the number of warps of a program over `tile` columns: one for every 256 columns, at
    least two and at most eight."""
    return min(max(tile // 256, 2), 8)


@triton.jit
def scaled_tile(logits_ptr, columns, valid, temperature):
    """Compute `scaled_scores` for one tile of one row, with -inf for invalid columns."""
    values = tl.load(logits_ptr + columns, mask=valid, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    values = tl.where(values > _MAX_LOGIT, _MAX_LOGIT, values)
    divisors = tl.zeros_like(values) + tl.maximum(temperature, _MIN_TEMPERATURE)
    return tl.div_rn(values, divisors)


@triton.jit
def _choose_in_tile(
    logits_ptr,
    logits_stride,
    num_columns,
    stream_keys_ptr,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    positions_ptr,
    ids_ptr,
    scores_ptr,
    winners_ptr,
    rows_per_slot,
    COUPLED: tl.constexpr,
    TARGET_ONLY: tl.constexpr,
    REJECTION: tl.constexpr,
    COUPLED_STREAM: tl.constexpr,
    TARGET_ONLY_STREAM: tl.constexpr,
    REJECTION_STREAM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the largest score of one tile of one row, with noise if the session has any, and its
    column."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row // rows_per_slot)
    temperature = tl.load(temperatures_ptr + slot)
    rule = tl.load(rules_ptr + slot)
    stream = tl.where(rule == COUPLED, COUPLED_STREAM, 0)
    stream = tl.where(rule == TARGET_ONLY, TARGET_ONLY_STREAM, stream)
    stream = tl.where(rule == REJECTION, REJECTION_STREAM, stream)
    columns = part * TILE + tl.arange(0, TILE)
    valid = columns < num_columns
    logits_ptr += row * logits_stride
    if (temperature > 0.0) & (stream > 0):
        scores = scaled_tile(logits_ptr, columns, valid, temperature)
        key = noise_key(stream_keys_ptr, slot, stream, tl.load(positions_ptr + row))
        best, winner = best_perturbed(scores, columns, valid, key, ids_ptr, HAS_IDS)
    else:
        values = tl.load(logits_ptr + columns, mask=valid, other=float("-inf")).to(tl.float32)
        values = tl.where(values == values, values, float("-inf"))
        top, winner = best_of(values, columns, valid)
        best = top.to(tl.float64)
    where = row * tl.num_programs(1) + part
    tl.store(scores_ptr + where, best)
    tl.store(winners_ptr + where, winner)


@triton.jit
def _choose_among_tiles(
    scores_ptr,
    winners_ptr,
    finite_ptr,
    chosen_ptr,
    tiles,
    HAS_FINITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the column with the largest score of all tiles of a row; -1 for a row without a finite
    logit."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    valid = parts < tiles
    where = row * tiles + parts
    scores = tl.load(scores_ptr + where, mask=valid, other=float("-inf"))
    winners = tl.load(winners_ptr + where, mask=valid, other=0)
    _, winner = best_of(scores, winners, valid)
    if HAS_FINITE:
        winner = tl.where(tl.load(finite_ptr + row) != 0, winner, -1)
    tl.store(chosen_ptr + row, winner)
