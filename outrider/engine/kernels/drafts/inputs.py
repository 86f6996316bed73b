# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Layout of a draft batch's rows, and the attention input of an EAGLE-3 block.

A draft batch first runs the new rows of each session (the tokens and features of the last round),
and then S steps of F rows, one row for each node that the step expands.

Shapes: B sessions, R new rows per session (rows past its count are padding), S steps, F rows of a
step per session, H hidden size, V target vocabulary size, X session slots, T blocks of a block
table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.heads.layers import rms_norm
from outrider.engine.kernels.runtime import next_power_of_2


class DraftLayout(NamedTuple):
    """Positions and KV slots of the rows of a draft batch. The live row of a session is its last
    new row, from which drafting starts."""

    positions: Tensor
    """int32 [B*R + S*B*F]: draft positions of the new rows, then of the rows of each step."""
    write_slots: Tensor
    """int64 [B*R + S*B*F]: slot of the KV pool for each row's KV; -1 for absent rows."""
    live_rows: Tensor
    """int64 [B]: index of each session's live row among the B*R new rows."""
    live: Tensor
    """int32 [B]: position of each session's live row, which is also the number of rows with KV
    before it."""
    following: Tensor
    """int32 [S + 1, B]: position of the token that each session's rows predict; first for the live
    row, then for the rows of each step."""


def draft_layout(
    counts: Tensor,
    starts: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    num_rows: int,
    num_steps: int,
    step_rows: int,
    block_tokens: int,
) -> DraftLayout:
    """Return the layout of the new rows and of the rows of the draft steps.

    counts: int32 [B], number of new rows of each session; the KV of its other rows is not written.
    starts: int32 [B], position of the first new row, which is also its KV slot in the session.
    tables: int32 [X, T], block tables. slots: int32 [B], session slots. num_rows: R. num_steps: S.
    step_rows: F. With s counted from 1, row f of step s has position live + s and KV slot live + 1
    + (s - 1) * F + f, and predicts the token at position live + 2 + s, where `live` is the position
    of the live row.
    """
    launch = draft_layout_triton if counts.is_cuda else draft_layout_torch
    return launch(
        counts,
        starts,
        tables,
        slots,
        num_rows=num_rows,
        num_steps=num_steps,
        step_rows=step_rows,
        block_tokens=block_tokens,
    )


def draft_layout_torch(
    counts: Tensor,
    starts: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    num_rows: int,
    num_steps: int,
    step_rows: int,
    block_tokens: int,
) -> DraftLayout:
    """Compute `draft_layout` with PyTorch operators."""
    device = counts.device
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    last = counts.clamp(min=1) - 1
    live = starts + last
    new_slots = starts[:, None] + rows
    there = rows < counts[:, None]
    drafted = torch.arange(num_steps * step_rows, dtype=torch.int32, device=device)
    step_slots = live[:, None] + 1 + drafted
    step_positions = live[:, None] + 1 + drafted // step_rows
    there = torch.cat((there, (counts > 0)[:, None].expand_as(step_slots)), dim=1)
    logical = torch.cat((new_slots, step_slots), dim=1)
    block = logical // block_tokens
    there &= block < tables.shape[1]
    blocks = tables[slots.long()].gather(1, block.clamp(max=tables.shape[1] - 1).long())
    pool = blocks.long() * block_tokens + logical % block_tokens
    pool = torch.where(there, pool, -1)

    def flat(table: Tensor) -> Tensor:
        steps = table[:, num_rows:].reshape(counts.shape[0], num_steps, step_rows).transpose(0, 1)
        return torch.cat((table[:, :num_rows].flatten(), steps.flatten()))

    batch = torch.arange(counts.shape[0], device=device)
    levels = torch.arange(num_steps + 1, dtype=torch.int32, device=device)
    return DraftLayout(
        positions=flat(torch.cat((new_slots, step_positions), dim=1)),
        write_slots=flat(pool),
        live_rows=batch * num_rows + last,
        live=live,
        following=live + 2 + levels[:, None],
    )


def draft_layout_triton(
    counts: Tensor,
    starts: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    num_rows: int,
    num_steps: int,
    step_rows: int,
    block_tokens: int,
) -> DraftLayout:
    """Compute `draft_layout` with one Triton kernel, one program per session."""
    batch, device = counts.shape[0], counts.device
    entries = num_rows + num_steps * step_rows

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    layout = DraftLayout(
        positions=empty(batch * entries),
        write_slots=empty(batch * entries, dtype=torch.int64),
        live_rows=empty(batch, dtype=torch.int64),
        live=empty(batch),
        following=empty(num_steps + 1, batch),
    )
    _layout_kernel[(batch,)](
        counts,
        starts,
        tables,
        slots,
        *layout,
        tables.stride(0),
        tables.shape[1],
        num_rows,
        num_steps,
        step_rows,
        BLOCK_TOKENS=block_tokens,
        BLOCK=next_power_of_2(entries),
        BLOCK_LEVELS=next_power_of_2(num_steps + 1),
        num_warps=1 if entries <= 128 else 4,
    )
    return layout


@triton.jit
def _layout_kernel(
    counts_ptr,
    starts_ptr,
    tables_ptr,
    slots_ptr,
    positions_ptr,
    write_slots_ptr,
    live_rows_ptr,
    live_ptr,
    following_ptr,
    table_stride,
    table_blocks,
    num_rows,
    num_steps,
    width,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
):
    row, batch = tl.program_id(0), tl.num_programs(0)
    count, start = tl.load(counts_ptr + row), tl.load(starts_ptr + row)
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    last = tl.maximum(count, 1) - 1
    live = start + last

    entry = tl.arange(0, BLOCK)
    inside = entry < num_rows + num_steps * width
    drafted = tl.maximum(entry - num_rows, 0)
    is_new = entry < num_rows
    position = tl.where(is_new, start + entry, live + 1 + drafted // width)
    slot = tl.where(is_new, start + entry, live + 1 + drafted)
    block = slot // BLOCK_TOKENS
    # A session without new rows has no steps either.
    limit = tl.where(count > 0, tl.where(is_new, count, num_rows + num_steps * width), 0)
    there = inside & (entry < limit) & (block < table_blocks)
    number = tl.load(table + block, mask=there, other=0).to(tl.int64)
    pool_slot = tl.where(there, number * BLOCK_TOKENS + slot % BLOCK_TOKENS, -1)
    step = batch * num_rows + ((drafted // width) * batch + row) * width + drafted % width
    out = tl.where(is_new, row * num_rows + entry, step)
    tl.store(positions_ptr + out, position, mask=inside)
    tl.store(write_slots_ptr + out, pool_slot, mask=inside)

    tl.store(live_rows_ptr + row, (row * num_rows + last).to(tl.int64))
    tl.store(live_ptr + row, live)
    level = tl.arange(0, BLOCK_LEVELS)
    tl.store(following_ptr + level * batch + row, live + 2 + level, mask=level <= num_steps)


class BlockInputs(NamedTuple):
    """Attention input and residual of the block of an EAGLE-3 head."""

    inputs: Tensor
    """[N, 2H]: [RMSNorm(embedding); RMSNorm(feature)]."""
    residual: Tensor
    """[N, H]: the features, or RMSNorm(feature) if the head sets `norm_before_residual`."""


def head_inputs(
    tokens: Tensor,
    features: Tensor,
    embedding: Tensor,
    input_norm: Tensor,
    hidden_norm: Tensor,
    *,
    eps: float,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
    norm_before_residual: bool = False,
) -> BlockInputs:
    """Return the attention input and the residual of N rows of an EAGLE-3 head (Li et al. 2025).

    tokens: int32 [N], target ids. If `ids` [Vd] is given, they are draft ids, and ids[t] is the
    target id of t. Negative tokens count as 0. features: [P, H]. rows: int32 [N], the index of the
    feature of each row; None if row i has feature i (P = N). embedding: [V, H]. input_norm,
    hidden_norm: [H], RMSNorm weights of embedding and feature.
    """
    launch = head_inputs_triton if features.is_cuda else head_inputs_torch
    return launch(
        tokens,
        features,
        embedding,
        input_norm,
        hidden_norm,
        eps=eps,
        ids=ids,
        rows=rows,
        norm_before_residual=norm_before_residual,
    )


def head_inputs_torch(
    tokens: Tensor,
    features: Tensor,
    embedding: Tensor,
    input_norm: Tensor,
    hidden_norm: Tensor,
    *,
    eps: float,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
    norm_before_residual: bool = False,
) -> BlockInputs:
    """Compute `head_inputs` with PyTorch operators."""
    found = tokens.clamp(min=0).long()
    if ids is not None:
        found = ids[found].long()
    if rows is not None:
        features = features[rows.long()]
    embedded = rms_norm(embedding[found], input_norm, eps)
    normed = rms_norm(features, hidden_norm, eps)
    return BlockInputs(
        torch.cat((embedded, normed), dim=-1), normed if norm_before_residual else features
    )


def head_inputs_triton(
    tokens: Tensor,
    features: Tensor,
    embedding: Tensor,
    input_norm: Tensor,
    hidden_norm: Tensor,
    *,
    eps: float,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
    norm_before_residual: bool = False,
) -> BlockInputs:
    """Compute `head_inputs` with one Triton kernel, one program for each half (embedding or
    feature) of each row."""
    num_rows, hidden = tokens.shape[0], features.shape[1]
    inputs = torch.empty((num_rows, 2 * hidden), dtype=features.dtype, device=features.device)
    residual = features
    copies = rows is not None or norm_before_residual
    if copies:
        residual = torch.empty((num_rows, hidden), dtype=features.dtype, device=features.device)
    block = next_power_of_2(hidden)
    _inputs_kernel[(num_rows, 2)](
        tokens,
        tokens if ids is None else ids,
        features,
        tokens if rows is None else rows,
        embedding,
        input_norm,
        hidden_norm,
        inputs,
        residual,
        features.stride(0),
        embedding.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_IDS=ids is not None,
        HAS_ROWS=rows is not None,
        COPIES=copies,
        NORMED_RESIDUAL=norm_before_residual,
        num_warps=min(max(block // 512, 1), 8),
    )
    return BlockInputs(inputs, residual)


@triton.jit
def _inputs_kernel(
    tokens_ptr,
    ids_ptr,
    features_ptr,
    rows_ptr,
    embedding_ptr,
    input_norm_ptr,
    hidden_norm_ptr,
    inputs_ptr,
    residual_ptr,
    feature_stride,
    embedding_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    COPIES: tl.constexpr,
    NORMED_RESIDUAL: tl.constexpr,
):
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if half == 0:
        token = tl.maximum(tl.load(tokens_ptr + row), 0).to(tl.int64)
        if HAS_IDS:
            token = tl.load(ids_ptr + token).to(tl.int64)
        raw = tl.load(embedding_ptr + token * embedding_stride + column, mask=inside, other=0.0)
        weight = tl.load(input_norm_ptr + column, mask=inside, other=0.0)
    else:
        source = row
        if HAS_ROWS:
            source = tl.load(rows_ptr + row).to(tl.int64)
        raw = tl.load(features_ptr + source * feature_stride + column, mask=inside, other=0.0)
        weight = tl.load(hidden_norm_ptr + column, mask=inside, other=0.0)
    wide = raw.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps))
    # Rounded before the weight too, as the plain head does.
    normed = normed.to(raw.dtype).to(tl.float32) * weight.to(tl.float32)
    normed = normed.to(raw.dtype)
    tl.store(inputs_ptr + row * (2 * HIDDEN) + half * HIDDEN + column, normed, mask=inside)
    if COPIES:
        # Nothing is inside this mask for half 0.
        kept = normed if NORMED_RESIDUAL else raw
        tl.store(residual_ptr + row * HIDDEN + column, kept, mask=column < HIDDEN * half)
