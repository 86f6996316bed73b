"""Logits processor on the device, in place, with its PyTorch reference.

It applies penalties, biases, bans, grammars, top-k, top-p and min-p with the same results, bit for
bit, as `outrider.engine.logits_processor`. The kernels that read the logits afterwards clamp them
to MAX_LOGIT and divide them by the temperature. Programs for rows of sessions without such
parameters return immediately.

Shape suffixes: R rows, V columns of the logits, B sessions of the batch bucket, X session slots, W
draft tokens of a session.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.launch import launch_count, launch_process
from outrider.engine.kernels.sampling import scaled_scores
from outrider.engine.kernels.session_tensors import (
    PROCESS_BIAS,
    PROCESS_GRAMMAR,
    PROCESS_PENALTIES,
    PROCESS_TRUNCATION,
    AllowedTokenBits,
    LogitsProcessorState,
    SamplingState,
)
from outrider.engine.truncation import MAX_COLUMNS, probability_thresholds
from outrider.errors import InvalidRequestError


def process_logits(
    logits: Tensor,
    warp: LogitsProcessorState,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    path: OutputPath | None = None,
    allowed_tokens: AllowedTokenBits | None = None,
) -> None:
    """Apply each session's penalties, biases, bans, grammar, top-k, top-p and min-p to its rows of
    logits, in place. Removed and banned columns become -inf, and so does NaN.

    logits: float32 [R, V], columns contiguous, rows of any stride. Row r belongs to the session in
    slot slots[r // rows_per_slot]; slots: int32 [B]. positions: int32 [R], the absolute position of
    the token that is chosen from the row. warp: the parameters of each session slot. path: draft
    tokens before that position, or None if there are none. allowed_tokens: masks of the tokens that
    grammars allow, or None if no session of the launch has a grammar.

    Every processed row keeps at least one column: if no logit is finite, the first column that is
    not banned is set to 0. In a row with a grammar it is the first such column that the grammar
    allows. Raises InvalidRequestError for other shapes or types.
    """
    if logits.dtype != torch.float32 or logits.shape[0] != rows_per_slot * slots.shape[0]:
        raise InvalidRequestError(
            f"{logits.shape[0]} rows of {logits.dtype} for {slots.shape[0]} slots of "
            f"{rows_per_slot}",
            reason="KERNEL_SHAPES",
        )
    if logits.shape[1] != warp.counts.shape[1] or logits.shape[1] > MAX_COLUMNS:
        raise InvalidRequestError(
            f"logits must have {warp.counts.shape[1]} columns, as the state has, and at most "
            f"{MAX_COLUMNS}; got {logits.shape[1]}",
            reason="KERNEL_SHAPES",
        )
    function = launch_process if logits.is_cuda else process_logits_torch
    assert path is None or path.columns.shape[1] < 2 or path.columns.stride(1) == 1
    function(
        logits,
        warp,
        state,
        slots,
        positions,
        rows_per_slot=rows_per_slot,
        path=path,
        allowed_tokens=allowed_tokens,
    )


def process_draft_logits(
    logits: Tensor,
    warp: LogitsProcessorState,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    path: OutputPath | None,
) -> Tensor:
    """Apply `process_logits` to draft logits [R, V] of dtype float32 or bfloat16, and return the
    float32 result. float32 logits are changed in place."""
    warped = logits.to(torch.float32)
    rows = logits.shape[0] // slots.shape[0]
    process_logits(warped, warp, state, slots, positions, rows_per_slot=rows, path=path)
    return warped


def process_logits_torch(
    logits: Tensor,
    warp: LogitsProcessorState,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    path: OutputPath | None = None,
    allowed_tokens: AllowedTokenBits | None = None,
) -> None:
    """Compute `process_logits` with PyTorch operators, one row at a time."""
    for row in range(logits.shape[0]):
        slot = int(slots[row // rows_per_slot])
        flags = int(warp.flags[slot])
        if not flags:
            continue
        values = logits[row]
        if flags & PROCESS_PENALTIES:
            on_path = _path_of(path, row, rows_per_slot)
            values = _penalised(values, warp, slot, on_path)
        banned = torch.zeros(len(values), dtype=torch.bool)
        if flags & PROCESS_BIAS:
            count = int(warp.entry_counts[slot])
            columns = warp.entry_columns[slot, :count].long()
            values = values.index_add(0, columns, warp.entry_amounts[slot, :count])
            banned[columns] = positions[row] < warp.entry_ends[slot, :count]
            values = values.masked_fill(banned, -math.inf)
        allowed = torch.ones(len(values), dtype=torch.bool)
        if allowed_tokens is not None and flags & PROCESS_GRAMMAR:
            allowed = _allowed(allowed_tokens, row, len(values))
            values = values.masked_fill(~allowed, -math.inf)
        values = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        if values.amax() == -math.inf:
            free = allowed & ~banned
            values[(free if free.any() else allowed).int().argmax()] = 0.0
        if flags & PROCESS_TRUNCATION:
            values = _cut(values, warp, state.temperatures[slot], slot)
        logits[row] = values


def _path_of(path: OutputPath | None, row: int, rows_per_slot: int) -> Tensor:
    """Return the columns of the draft tokens on a row's path, int64."""
    if path is None:
        return torch.zeros(0, dtype=torch.int64)
    owner, place = divmod(row, rows_per_slot)
    columns = path.columns[owner]
    if path.mask is None:
        columns = columns[: path.num_visible + place]
    else:
        columns = columns[path.mask[owner, place].bool()]
    return columns[columns >= 0].long()


def _allowed(allowed_tokens: AllowedTokenBits, row: int, columns: int) -> Tensor:
    """Return whether a grammar allows each column in this row, bool [V]."""
    ids = torch.arange(columns)
    bits = allowed_tokens.bits[int(allowed_tokens.row_indices[row])]
    words = ids >> 5
    inside = words < len(bits)
    found = (bits[words.clamp(max=len(bits) - 1)] >> (ids & 31).int()) & 1
    return inside & (found != 0)


def _penalised(values: Tensor, warp: LogitsProcessorState, slot: int, on_path: Tensor) -> Tensor:
    counts = warp.counts[slot].clone()
    counts.index_add_(0, on_path, torch.full_like(on_path, 2, dtype=torch.int32))
    repetition, frequency, presence = warp.penalties[slot].double().tolist()
    divisor = torch.full_like(values, repetition)
    repeated = torch.where(values > 0, values / divisor, values * divisor)
    values = torch.where(counts > 0, repeated, values)
    amounts = ((counts >> 1).double() * frequency + presence).float()
    return torch.where(counts > 1, values - amounts, values)


def _cut(values: Tensor, warp: LogitsProcessorState, temperature: Tensor, slot: int) -> Tensor:
    scores = scaled_scores(values[None], temperature[None])
    lowest = probability_thresholds(
        scores,
        [int(warp.top_ks[slot])],
        [float(warp.top_ps[slot])],
        [float(warp.min_p_floors[slot])],
    )
    return values.masked_fill(scores[0] < lowest, -math.inf)


def count_tokens(
    tokens: Tensor,
    counts: Tensor,
    warp: LogitsProcessorState,
    slots: Tensor,
    *,
    columns: Tensor | None = None,
) -> None:
    """Add the new tokens of a round to the output token counts of sessions with penalties.

    tokens: int32 [B, N], target ids, of which the first counts[b] of row b are new. counts: int32
    [B]. warp: holds the output token counts. slots: int32 [B], session slots. columns: int32, for
    each target id its column in the logits, or -1 if it has none; None if the columns are the
    target ids.
    """
    function = launch_count if tokens.is_cuda else count_tokens_torch
    function(tokens, counts, warp, slots, columns=columns)


def count_tokens_torch(
    tokens: Tensor,
    counts: Tensor,
    warp: LogitsProcessorState,
    slots: Tensor,
    *,
    columns: Tensor | None = None,
) -> None:
    """Compute `count_tokens` with PyTorch operators."""
    width = warp.counts.shape[1]
    owners = slots.long()[:, None].expand_as(tokens)
    new = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
    new &= (warp.flags[owners] & PROCESS_PENALTIES) > 0
    ids, owners = tokens[new].long(), owners[new]
    limit = width if columns is None else len(columns)
    known = (ids >= 0) & (ids < limit)
    ids, owners = ids[known], owners[known]
    if columns is not None:
        ids = columns[ids].long()
        ids, owners = ids[ids >= 0], owners[ids >= 0]
    twos = torch.full_like(ids, 2, dtype=torch.int32)
    warp.counts.view(-1).index_add_(0, owners * width + ids, twos)
