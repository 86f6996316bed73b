# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Layout of the token rows of a round: positions, KV slots and the tree mask.

Shapes: B sessions of the batch bucket, N nodes per session (the root and N - 1 draft nodes), M =
B * N token rows (one per node), X session slots, T blocks of a block table.

The KV slots of a session are numbered from 0 (logical slots); its block table maps them to slots of
the KV pool. `context` is the number of logical slots that already hold KV. The root has logical
slot and position `context`. Node j has logical slot context + j and position context + depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.runtime import next_power_of_2
from outrider.errors import InvalidRequestError

PADDING_NODE = -2
"""Parent of an absent node. Such a node has the root's position and attends to itself only."""


class RoundLayout(NamedTuple):
    """Layout of the token rows of one round."""

    positions: Tensor
    """int32 [M]: absolute position of each row."""
    write_slots: Tensor
    """int64 [M]: slot of the KV pool where each row's KV is written; -1 for rows past the end of
    the block table, whose KV is not written."""
    mask: Tensor | None
    """uint8 [B, N, N]: entry (b, j, w) is 1 if node j attends to node w. None for chains, whose
    mask is causal."""
    paths: Tensor | None = None
    """int32 [B, N, N]: entry (b, j, e) is the node at depth e on the path from the root to node j,
    padded with 0. None for chains, and for trees if paths were not requested."""


def tree_layout(
    parents: Tensor | None,
    context: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    num_nodes: int,
    block_tokens: int,
    with_paths: bool = False,
) -> RoundLayout:
    """Return the layout of the token rows of a round.

    parents: int32 [B, N - 1], for each draft node the index of its parent among the draft nodes,
    which must be lower than its own; -1 if the parent is the root, PADDING_NODE for absent nodes.
    None for chains. context: int32 [B], the number of KV slots of each session that hold KV.
    tables: int32 [X, T], block tables. slots: int32 [B], session slots. with_paths: whether to
    return the paths of trees. Raises InvalidRequestError if `parents` has another shape.
    """
    if parents is not None and parents.shape != (slots.shape[0], num_nodes - 1):
        raise InvalidRequestError(
            f"parents of shape {tuple(parents.shape)} for {slots.shape[0]} x {num_nodes} nodes"
        )
    launch = tree_layout_triton if context.is_cuda else tree_layout_torch
    return launch(
        parents,
        context,
        tables,
        slots,
        num_nodes=num_nodes,
        block_tokens=block_tokens,
        with_paths=with_paths,
    )


def tree_layout_torch(
    parents: Tensor | None,
    context: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    num_nodes: int,
    block_tokens: int,
    with_paths: bool = False,
) -> RoundLayout:
    """Compute `tree_layout` with PyTorch operators."""
    nodes = torch.arange(num_nodes, dtype=torch.int32, device=context.device)
    logical = context[:, None] + nodes
    write_slots = pool_slots(tables, slots, logical, block_tokens).flatten()
    if parents is None:
        return RoundLayout(logical.flatten(), write_slots, None)
    batch = torch.arange(slots.shape[0], device=context.device)
    mask = torch.eye(num_nodes, dtype=torch.uint8, device=context.device)
    mask = mask.repeat(slots.shape[0], 1, 1)
    depth = torch.zeros((slots.shape[0], num_nodes), dtype=torch.int32, device=context.device)
    for node in range(1, num_nodes):
        parent = parents[:, node - 1].long() + 1
        exists = parent >= 0
        parent = parent.clamp(min=0)
        mask[:, node] |= mask[batch, parent] * exists[:, None]
        depth[:, node] = (depth[batch, parent] + 1) * exists
    paths = None
    if with_paths:
        # A parent comes before its children, so that a path is what a row sees, in order.
        paths = torch.where(mask.bool(), nodes, num_nodes).sort(dim=-1).values % num_nodes
    return RoundLayout((context[:, None] + depth).flatten(), write_slots, mask, paths)


def tree_layout_triton(
    parents: Tensor | None,
    context: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    num_nodes: int,
    block_tokens: int,
    with_paths: bool = False,
) -> RoundLayout:
    """Compute `tree_layout` with one Triton kernel. The program of each token row follows the
    parents up to the root."""
    batch, device = slots.shape[0], context.device
    positions = torch.empty(batch * num_nodes, dtype=torch.int32, device=device)
    write_slots = torch.empty(batch * num_nodes, dtype=torch.int64, device=device)
    mask, paths = None, None
    if parents is not None:
        parents = parents.contiguous()
        mask = torch.empty((batch, num_nodes, num_nodes), dtype=torch.uint8, device=device)
        paths = torch.empty_like(mask, dtype=torch.int32) if with_paths else None
    _layout_kernel[(num_nodes, batch)](
        positions if parents is None else parents,
        context,
        tables,
        slots,
        positions,
        write_slots,
        positions if mask is None else mask,
        positions if paths is None else paths,
        num_nodes,
        tables.stride(0),
        tables.shape[1],
        BLOCK_TOKENS=block_tokens,
        NODES=next_power_of_2(num_nodes),
        CHAIN=parents is None,
        PATHS=paths is not None,
        num_warps=1,
    )
    return RoundLayout(positions, write_slots, mask, paths)


@triton.jit
def _layout_kernel(
    parents_ptr,
    context_ptr,
    tables_ptr,
    slots_ptr,
    positions_ptr,
    write_slots_ptr,
    mask_ptr,
    paths_ptr,
    num_nodes,
    table_stride,
    table_width,
    BLOCK_TOKENS: tl.constexpr,
    NODES: tl.constexpr,
    CHAIN: tl.constexpr,
    PATHS: tl.constexpr,
):
    node = tl.program_id(0)
    b = tl.program_id(1)
    context = tl.load(context_ptr + b)
    table = tables_ptr + tl.load(slots_ptr + b).to(tl.int64) * table_stride
    row = b * num_nodes + node
    logical = context + node
    block = logical // BLOCK_TOKENS
    fits = block < table_width
    pool_block = tl.load(table + block, mask=fits, other=0).to(tl.int64)
    pool_slot = pool_block * BLOCK_TOKENS + logical % BLOCK_TOKENS
    tl.store(write_slots_ptr + row, tl.where(fits, pool_slot, -1))
    depth = node
    if not CHAIN:
        columns = tl.arange(0, NODES)
        seen = columns == node
        depth = node * 0
        current = node
        while current > 0:
            parent = tl.load(parents_ptr + b * (num_nodes - 1) + current - 1) + 1
            # Always true of a tree; it ends the walk on any input.
            current = tl.minimum(parent, current - 1)
            seen = seen | (columns == current)
            depth += (current >= 0).to(tl.int32)
        out = row.to(tl.int64) * num_nodes
        tl.store(mask_ptr + out + columns, seen.to(tl.uint8), mask=columns < num_nodes)
        if PATHS:
            # A parent comes before its children, so that a path is what the row sees, in order.
            place = tl.cumsum(seen.to(tl.int32), axis=0) - 1
            tl.store(paths_ptr + out + place, columns, mask=seen)
            unused = (columns > depth) & (columns < num_nodes)
            tl.store(paths_ptr + out + columns, columns * 0, mask=unused)
    tl.store(positions_ptr + row, context + depth)


def pool_slots(tables: Tensor, slots: Tensor, logical: Tensor, block_tokens: int) -> Tensor:
    """Map logical KV slots of sessions, [B, n], to slots of the KV pool, int64 [B, n].

    tables: [X, T], block tables. slots: [B], the session slots. logical: values >= 0. The result is
    -1 for logical slots past the end of the block table.
    """
    logical = logical.long()
    block = logical // block_tokens
    fits = block < tables.shape[1]
    rows = tables[slots.long()].long()
    pool_block = rows.gather(1, block.clamp(max=tables.shape[1] - 1))
    return torch.where(fits, pool_block * block_tokens + logical % block_tokens, -1)
