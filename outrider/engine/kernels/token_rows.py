# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Builds the verify input of a round: token ids of each session's root and draft tokens.

The root is the newest committed token of a session, which the target has not processed yet. The
root and the draft tokens of a session are its nodes. A slot is a session's index in the per-session
device tensors (`session_tensors`).

Shapes: B sessions, N nodes per session, X session slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.runtime import next_power_of_2
from outrider.engine.kernels.session_tensors import SequenceState


def build_verify_inputs(
    sequence: SequenceState, slots: Tensor, drafts: Tensor, *, num_nodes: int, by_slot: bool
) -> tuple[Tensor, Tensor]:
    """Return the input token ids, int32 [B * N], and the context lengths, int32 [B], of a round.

    The context length of a session is the number of its tokens with KV in the cache, which are its
    committed tokens without the root. slots: int32 [B], session slots. drafts: int32, draft tokens
    in at least N - 1 columns; row b belongs to session b of the batch, or, if `by_slot` is set, to
    the session in slot b.
    """
    function = build_verify_inputs_triton if slots.is_cuda else build_verify_inputs_torch
    return function(sequence, slots, drafts, num_nodes=num_nodes, by_slot=by_slot)


def build_verify_inputs_torch(
    sequence: SequenceState, slots: Tensor, drafts: Tensor, *, num_nodes: int, by_slot: bool
) -> tuple[Tensor, Tensor]:
    """Compute `build_verify_inputs` with PyTorch operators."""
    roots = sequence.roots.index_select(0, slots)
    if by_slot:
        drafts = drafts.index_select(0, slots)
    tokens = torch.cat((roots[:, None], drafts[:, : num_nodes - 1]), dim=1)
    return tokens.reshape(-1), sequence.lengths.index_select(0, slots) - 1


def build_verify_inputs_triton(
    sequence: SequenceState, slots: Tensor, drafts: Tensor, *, num_nodes: int, by_slot: bool
) -> tuple[Tensor, Tensor]:
    """Compute `build_verify_inputs` with one Triton kernel, one program per session."""
    rows = slots.shape[0]
    tokens = torch.empty(rows * num_nodes, dtype=torch.int32, device=slots.device)
    context = torch.empty(rows, dtype=torch.int32, device=slots.device)
    _build_verify_inputs_kernel[(rows,)](
        sequence.roots,
        sequence.lengths,
        slots,
        drafts,
        drafts.stride(0),
        tokens,
        context,
        NODES=num_nodes,
        BLOCK=next_power_of_2(num_nodes),
        BY_SLOT=by_slot,
        num_warps=1,
    )
    return tokens, context


@triton.jit
def _build_verify_inputs_kernel(
    roots,
    lengths,
    slots,
    drafts,
    drafts_stride,
    tokens,
    context,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_SLOT: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    source = slot if BY_SLOT else row
    node = tl.arange(0, BLOCK)
    drafted = tl.load(
        drafts + source.to(tl.int64) * drafts_stride + node - 1,
        mask=(node > 0) & (node < NODES),
        other=0,
    )
    root = tl.load(roots + slot)
    tl.store(tokens + row * NODES + node, tl.where(node == 0, root, drafted), mask=node < NODES)
    tl.store(context + row, tl.load(lengths + slot) - 1)
