# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Final selection of a dynamic draft tree: the best n candidates, parents before children.

Shapes: B sessions, C candidates per session, n nodes of the tree, Vd draft vocabulary size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.engine.kernels.drafts.growth import NUM_COMPARED_CANDIDATES, TreeCandidates
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.spec.tree import ROOT


class TreeDraft(NamedTuple):
    """Draft trees of up to n nodes per session. Absent nodes come last."""

    tokens: Tensor
    """int32 [B, n]: target ids; -1 for absent nodes."""
    parents: Tensor
    """int32 [B, n]: index of each node's parent, which is lower than its own; ROOT if the parent is
    the root, PADDING_NODE for absent nodes."""
    logprobs: Tensor
    """float32 [B, n]: sum of log-probs along the path; -inf for absent nodes."""


def rank_tree(candidates: TreeCandidates, target_ids: Tensor, *, num_nodes: int) -> TreeDraft:
    """Select the `num_nodes` candidates with the highest scores as the nodes of the draft trees.

    Nodes keep the order of the candidate list, so parents come before their children, and better
    siblings come before worse ones. target_ids: [Vd], the target id of every draft id.
    """
    launch = rank_tree_triton if candidates.scores.is_cuda else rank_tree_torch
    return launch(candidates, target_ids, num_nodes=num_nodes)


def rank_tree_torch(candidates: TreeCandidates, target_ids: Tensor, *, num_nodes: int) -> TreeDraft:
    """Compute `rank_tree` with PyTorch operators."""
    scores, columns, parents = candidates
    kept = min(num_nodes, scores.shape[1])
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
    best &= scores > -torch.inf
    places = best.int().cumsum(dim=1) - 1
    chosen = torch.sort((~best).int(), dim=1, stable=True).indices[:, :kept]
    exists = best.gather(1, chosen)
    above = parents.gather(1, chosen).long()
    moved = torch.where(above >= 0, places.gather(1, above.clamp(min=0)), ROOT)
    tokens = target_ids[columns.gather(1, chosen).clamp(min=0).long()]
    missing = num_nodes - kept
    pad = torch.nn.functional.pad
    return TreeDraft(
        tokens=pad(torch.where(exists, tokens, -1).int(), (0, missing), value=-1),
        parents=pad(
            torch.where(exists, moved, PADDING_NODE).int(), (0, missing), value=PADDING_NODE
        ),
        logprobs=pad(
            torch.where(exists, scores.gather(1, chosen), -torch.inf),
            (0, missing),
            value=-torch.inf,
        ),
    )


def rank_tree_triton(
    candidates: TreeCandidates, target_ids: Tensor, *, num_nodes: int
) -> TreeDraft:
    """Compute `rank_tree` with two Triton kernels. The first one ranks each candidate by counting
    better ones. The second one numbers the selected candidates by a prefix sum."""
    batch, count = candidates.scores.shape
    device = candidates.scores.device
    block = min(next_power_of_2(count), 128)
    chosen = torch.empty((batch, count), dtype=torch.int32, device=device)
    _rank_kernel[(batch, cdiv(count, block))](
        candidates.scores,
        chosen,
        count,
        NODES=num_nodes,
        BLOCK=block,
        RIVALS=NUM_COMPARED_CANDIDATES,
        num_warps=4,
    )
    tree = TreeDraft(
        tokens=torch.empty((batch, num_nodes), dtype=torch.int32, device=device),
        parents=torch.empty((batch, num_nodes), dtype=torch.int32, device=device),
        logprobs=torch.empty((batch, num_nodes), dtype=torch.float32, device=device),
    )
    _compact_kernel[(batch,)](
        *candidates,
        chosen,
        target_ids,
        *tree,
        count,
        NODES=num_nodes,
        ROOT=ROOT,
        PADDING=PADDING_NODE,
        BLOCK=min(next_power_of_2(count), 1024),
        BLOCK_NODES=next_power_of_2(num_nodes),
        num_warps=4,
    )
    return tree


@triton.jit
def _rank_kernel(
    scores_ptr,
    chosen_ptr,
    count,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
):
    """Mark the best NODES candidates of a session, without those of score -inf."""
    row = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    scores = tl.load(scores_ptr + row * count + index, mask=inside, other=float("-inf"))
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        exists = rival < count
        theirs = tl.load(scores_ptr + row * count + rival, mask=exists, other=float("-inf"))
        tied = (theirs[None, :] == scores[:, None]) & (rival[None, :] < index[:, None])
        beats = (theirs[None, :] > scores[:, None]) | tied
        rank += tl.sum((beats & exists[None, :]).to(tl.int32), axis=1)
    best = (rank < NODES) & (scores > float("-inf"))
    tl.store(chosen_ptr + row * count + index, best.to(tl.int32), mask=inside)


@triton.jit
def _compact_kernel(
    scores_ptr,
    columns_ptr,
    parents_ptr,
    chosen_ptr,
    ids_ptr,
    tokens_ptr,
    out_parents_ptr,
    logprobs_ptr,
    count,
    NODES: tl.constexpr,
    ROOT: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Write the marked candidates to consecutive nodes. The mark of a chosen candidate is replaced
    by the index of its node plus 1; the others stay 0."""
    row = tl.program_id(0)
    first = row * count
    total = 0
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        mark = tl.load(chosen_ptr + first + index, mask=inside, other=0)
        place = total + tl.cumsum(mark, axis=0)
        tl.store(chosen_ptr + first + index, tl.where(mark > 0, place, 0), mask=inside)
        total += tl.sum(mark, axis=0)
    # Parents are read by other threads than those that placed them.
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        place = tl.load(chosen_ptr + first + index, mask=index < count, other=0)
        best = place > 0
        out = row * NODES + place - 1
        column = tl.load(columns_ptr + first + index, mask=best, other=0)
        tl.store(tokens_ptr + out, tl.load(ids_ptr + column, mask=best, other=0), mask=best)
        parent = tl.load(parents_ptr + first + index, mask=best, other=ROOT)
        below = best & (parent >= 0)
        above = tl.load(chosen_ptr + first + parent, mask=below, other=0) - 1
        tl.store(out_parents_ptr + out, tl.where(below, above, ROOT), mask=best)
        tl.store(logprobs_ptr + out, tl.load(scores_ptr + first + index, mask=best), mask=best)
    node = tl.arange(0, BLOCK_NODES)
    missing = (node >= total) & (node < NODES)
    tl.store(tokens_ptr + row * NODES + node, -1, mask=missing)
    tl.store(out_parents_ptr + row * NODES + node, PADDING, mask=missing)
    tl.store(logprobs_ptr + row * NODES + node, float("-inf"), mask=missing)
