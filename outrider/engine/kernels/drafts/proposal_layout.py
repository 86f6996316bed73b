# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Layout of proposal trees for scoring: position, parent and attention mask of each node.

A session's live row is its last row before the tree, so it is the parent of the tree's first level.

Shapes: B sessions, N nodes per session, P = 1 + N places per session (the live row, then the
nodes).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.runtime import next_power_of_2
from outrider.spec.tree import ROOT


class ProposalLayout(NamedTuple):
    """Positions, parents and attention mask of the nodes of proposal trees."""

    positions: Tensor
    """int32 [B * N]: draft position of each node: the position of the live row plus the depth of
    the node, which is 1 for children of the live row."""
    following: Tensor
    """int32 [B * P]: position of the token that each place predicts."""
    sources: Tensor
    """int32 [B * N]: the place of each node's parent, as an index into all B * P places."""
    seen: Tensor
    """uint8 [B, P, N]: entry (b, p, n) is 1 if place p attends to node n, that is, if n is the node
    of the place or one of its ancestors. The live row, place 0, attends to no node."""


def layout_proposals(parents: Tensor, live: Tensor) -> ProposalLayout:
    """Return the layout of proposal trees.

    parents: int32 [B, N], the index of each node's parent, which must be lower than its own, or
    ROOT if the parent is the live row. live: int32 [B], the position of the live row.
    """
    return (layout_proposals_triton if parents.is_cuda else layout_proposals_torch)(parents, live)


def layout_proposals_torch(parents: Tensor, live: Tensor) -> ProposalLayout:
    """Compute `layout_proposals` with PyTorch operators."""
    batch, count = parents.shape
    nodes = torch.arange(count, device=parents.device)
    seen = torch.zeros((batch, 1 + count, count), dtype=torch.uint8, device=parents.device)
    path = nodes.expand(batch, -1)
    while bool((path >= 0).any()):
        seen[:, 1:] |= ((path[:, :, None] == nodes) & (path >= 0)[:, :, None]).to(torch.uint8)
        above = parents.gather(1, path.clamp(min=0)).long()
        path = torch.where(path >= 0, above, path)
    depths = seen.sum(dim=2, dtype=torch.int32)
    first = (1 + count) * torch.arange(batch, dtype=torch.int32, device=parents.device)
    return ProposalLayout(
        positions=(live[:, None] + depths[:, 1:]).flatten(),
        following=(live[:, None] + 2 + depths).flatten(),
        sources=(first[:, None] + 1 + parents).flatten(),
        seen=seen,
    )


def layout_proposals_triton(parents: Tensor, live: Tensor) -> ProposalLayout:
    """Compute `layout_proposals` with one Triton kernel, one program per session."""
    (batch, count), device = parents.shape, parents.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    layout = ProposalLayout(
        positions=empty(batch * count),
        following=empty(batch * (1 + count)),
        sources=empty(batch * count),
        seen=empty(batch, 1 + count, count, dtype=torch.uint8),
    )
    _given_kernel[(batch,)](
        parents, live, *layout, count, ABOVE=ROOT, BLOCK=next_power_of_2(count), num_warps=4
    )
    return layout


@triton.jit
def _given_kernel(
    parents_ptr,
    live_ptr,
    positions_ptr,
    following_ptr,
    sources_ptr,
    seen_ptr,
    count,
    ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    session = tl.program_id(0)
    live = tl.load(live_ptr + session)
    node = tl.arange(0, BLOCK)
    inside = node < count
    parents = parents_ptr + session * count
    path = tl.where(inside, node, ABOVE)
    seen = tl.zeros((BLOCK, BLOCK), dtype=tl.uint8)
    depth = tl.zeros((BLOCK,), dtype=tl.int32)
    # A path has every node once at most.
    while tl.max(path, axis=0) > ABOVE:
        seen = tl.where(path[:, None] == node[None, :], 1, seen).to(tl.uint8)
        depth += (path > ABOVE).to(tl.int32)
        path = tl.load(parents + path, mask=path > ABOVE, other=ABOVE)

    place = session * (count + 1)
    above = tl.load(parents + node, mask=inside, other=ABOVE)
    tl.store(positions_ptr + session * count + node, live + depth, mask=inside)
    tl.store(sources_ptr + session * count + node, place + 1 + above, mask=inside)
    tl.store(following_ptr + place, live + 2)
    tl.store(following_ptr + place + 1 + node, live + 2 + depth, mask=inside)
    rows = seen_ptr + place * count
    tl.store(rows + node, tl.zeros((BLOCK,), dtype=tl.uint8), mask=inside)
    cells = (1 + node[:, None]) * count + node[None, :]
    tl.store(rows + cells, seen, mask=inside[:, None] & inside[None, :])
