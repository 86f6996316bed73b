# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Dynamic draft tree growth of EAGLE-2 on the device (Li et al. 2024), over fp32 log-prob sums.

A draft step expands the nodes of the frontier: each one, a row of the step, adds its k best
children to a list of candidates. The best F candidates of a level are the frontier of the next
step. The best n candidates of the whole list form the tree (`tree_rank`). Scores are sums of
log-probs, because products of probabilities near 1 would round to the same value. If two scores are
equal, the candidate with the lower index is better. A child never has a higher score than its
parent and always has a higher index, so no child is chosen without its parent.

Shapes: B sessions, P rows of a step, k candidates per row, C candidates in total, F rows of the
next step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.runtime import next_power_of_2
from outrider.spec.tree import ROOT

NUM_COMPARED_CANDIDATES = 32
"""Number of candidates with which a program compares all candidates of its session at a time."""


class TreeCandidates(NamedTuple):
    """Candidate nodes of the draft tree of each session, one level after another. A score of -inf
    marks an entry without a candidate."""

    scores: Tensor
    """float32 [B, C]: sum of log-probs along the path from the root, <= 0."""
    columns: Tensor
    """int32 [B, C]: token of each candidate, as an id of the draft vocabulary."""
    parents: Tensor
    """int32 [B, C]: index of the parent in the candidate list; ROOT on the first level."""


class FrontierRows(NamedTuple):
    """Nodes that one draft step expands, one row each. The rows of a session are ordered by score,
    best first."""

    nodes: Tensor
    """int32 [B, F]: index of each node in the candidate list."""
    columns: Tensor
    """int32 [B, F]: token of each node, as an id of the draft vocabulary."""
    parents: Tensor
    """int32 [B, F]: b * P + p, where p is the row of the node's parent among the P rows of session
    b in the previous step."""
    scores: Tensor
    """float32 [B, F]: score of each node, see `TreeCandidates`."""


def num_candidates(top_k: int, width: int, depth: int) -> int:
    """Return the number of candidates of a tree of `depth` levels: `top_k` children of the root,
    and `top_k` children of each of `width` nodes for every further level."""
    return top_k + (depth - 1) * width * top_k


def empty_candidates(batch: int, count: int, device: torch.device) -> TreeCandidates:
    """Return uninitialised candidate lists with space for `count` candidates per session."""
    return TreeCandidates(
        scores=torch.empty((batch, count), dtype=torch.float32, device=device),
        columns=torch.empty((batch, count), dtype=torch.int32, device=device),
        parents=torch.empty((batch, count), dtype=torch.int32, device=device),
    )


def select_frontier(
    logprobs: Tensor,
    columns: Tensor,
    above: FrontierRows | None,
    candidates: TreeCandidates,
    first: int,
    *,
    width: int,
) -> FrontierRows:
    """Write the candidate nodes of one tree level to `candidates`. Return the `width` candidates of
    this level with the highest scores, which the next draft step expands.

    A draft step expands P nodes of each of B sessions, one node per row, and finds k children of
    each. These P * k children are the candidates of the level. They are written to the entries of
    `candidates` from index `first` on. logprobs: float32 [B * P, k], log-probs of the children. A
    log-prob above 0 counts as 0, NaN as -inf. columns: int32 [B * P, k], tokens of the children.
    above: the expanded nodes; None if the root is expanded (P = 1). width: at most P * k. A child
    with log-prob -inf is no candidate. If a level has fewer than `width` candidates, the rest of
    the result are rows with score -inf, whose children get the score -inf, too.
    """
    launch = select_frontier_triton if logprobs.is_cuda else select_frontier_torch
    return launch(logprobs, columns, above, candidates, first, width=width)


def select_frontier_torch(
    logprobs: Tensor,
    columns: Tensor,
    above: FrontierRows | None,
    candidates: TreeCandidates,
    first: int,
    *,
    width: int,
) -> FrontierRows:
    """Compute `select_frontier` with PyTorch operators."""
    batch, top_k = candidates.scores.shape[0], logprobs.shape[1]
    added = logprobs.clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    scores = added.view(batch, -1, top_k)
    if above is not None:
        scores = scores + above.scores[:, :, None]
        nodes = above.nodes[:, :, None].expand(-1, -1, top_k).flatten(1)
    else:
        nodes = torch.full((batch, top_k), ROOT, dtype=torch.int32, device=logprobs.device)
    rows = scores.shape[1]
    scores, flat_columns = scores.flatten(1), columns.view(batch, -1)
    level = slice(first, first + rows * top_k)
    candidates.scores[:, level] = scores
    candidates.columns[:, level] = flat_columns
    candidates.parents[:, level] = nodes
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    base = torch.arange(batch, device=logprobs.device)[:, None] * rows
    return FrontierRows(
        nodes=(best + first).int(),
        columns=flat_columns.gather(1, best),
        parents=(base + best // top_k).int(),
        scores=scores.gather(1, best),
    )


def select_frontier_triton(
    logprobs: Tensor,
    columns: Tensor,
    above: FrontierRows | None,
    candidates: TreeCandidates,
    first: int,
    *,
    width: int,
) -> FrontierRows:
    """Compute `select_frontier` with one Triton kernel, one program per session. The rank of a
    candidate is the number of better candidates of its level."""
    batch, count = candidates.scores.shape
    top_k, rows = logprobs.shape[1], logprobs.shape[0] // batch

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty((batch, width), dtype=dtype, device=logprobs.device)

    chosen = FrontierRows(
        empty(torch.int32), empty(torch.int32), empty(torch.int32), empty(torch.float32)
    )
    block = next_power_of_2(max(rows * top_k, NUM_COMPARED_CANDIDATES))
    _frontier_kernel[(batch,)](
        logprobs,
        columns,
        chosen.nodes if above is None else above.nodes,
        chosen.scores if above is None else above.scores,
        *candidates,
        *chosen,
        first,
        count,
        ROWS=rows,
        TOP_K=top_k,
        WIDTH=width,
        ROOT=ROOT,
        IS_ROOT=above is None,
        BLOCK=block,
        RIVALS=NUM_COMPARED_CANDIDATES,
        num_warps=min(max(block // 64, 1), 8),
    )
    return chosen


@triton.jit
def _scores_of(
    logprobs_ptr,
    above_ptr,
    row,
    index,
    inside,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_ROOT: tl.constexpr,
):
    """Return the scores of the candidates `index` of one level of session `row`; -inf for indices
    out of range."""
    size = ROWS * TOP_K
    added = tl.load(logprobs_ptr + row * size + index, mask=inside, other=float("-inf"))
    # A NaN fails this comparison.
    added = tl.where(added <= 0.0, added, tl.where(added > 0.0, 0.0, float("-inf")))
    if not IS_ROOT:
        added += tl.load(above_ptr + row * ROWS + index // TOP_K, mask=inside, other=0.0)
    return added


@triton.jit
def _frontier_kernel(
    logprobs_ptr,
    columns_ptr,
    above_nodes_ptr,
    above_scores_ptr,
    list_scores_ptr,
    list_columns_ptr,
    list_parents_ptr,
    nodes_ptr,
    out_columns_ptr,
    parents_ptr,
    scores_ptr,
    first,
    count,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOT: tl.constexpr,
    IS_ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
):
    row = tl.program_id(0)
    size: tl.constexpr = ROWS * TOP_K
    index = tl.arange(0, BLOCK)
    inside = index < size
    scores = _scores_of(logprobs_ptr, above_scores_ptr, row, index, inside, ROWS, TOP_K, IS_ROOT)
    columns = tl.load(columns_ptr + row * size + index, mask=inside, other=0)
    parents = tl.full((BLOCK,), ROOT, tl.int32)
    if not IS_ROOT:
        parents = tl.load(above_nodes_ptr + row * ROWS + index // TOP_K, mask=inside, other=ROOT)
    listed = row * count + first + index
    tl.store(list_scores_ptr + listed, scores, mask=inside)
    tl.store(list_columns_ptr + listed, columns, mask=inside)
    tl.store(list_parents_ptr + listed, parents, mask=inside)

    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        exists = rival < size
        theirs = _scores_of(
            logprobs_ptr, above_scores_ptr, row, rival, exists, ROWS, TOP_K, IS_ROOT
        )
        tied = (theirs[None, :] == scores[:, None]) & (rival[None, :] < index[:, None])
        beats = (theirs[None, :] > scores[:, None]) | tied
        rank += tl.sum((beats & exists[None, :]).to(tl.int32), axis=1)
    chosen = inside & (rank < WIDTH)
    out = row * WIDTH + rank
    tl.store(nodes_ptr + out, first + index, mask=chosen)
    tl.store(out_columns_ptr + out, columns, mask=chosen)
    tl.store(parents_ptr + out, row * ROWS + index // TOP_K, mask=chosen)
    tl.store(scores_ptr + out, scores, mask=chosen)


def grow_mask(mask: Tensor | None, parents: Tensor) -> Tensor:
    """Return the attention mask of the next draft step, uint8 [B, F, W + F]. Each of the F rows of
    a session attends to itself and to the rows of earlier steps to which its parent attends.

    mask: uint8 [B, P, W], the mask of the previous step, whose rows see W rows in total; None if
    there was none (W = 0). parents: int32 [B, F], see `FrontierRows`.
    """
    return (grow_mask_triton if parents.is_cuda else grow_mask_torch)(mask, parents)


def grow_mask_torch(mask: Tensor | None, parents: Tensor) -> Tensor:
    """Compute `grow_mask` with PyTorch operators."""
    batch, width = parents.shape
    own = torch.eye(width, dtype=torch.uint8, device=parents.device).expand(batch, -1, -1)
    if mask is None:
        return own.contiguous()
    return torch.cat((mask.flatten(0, 1)[parents.long()], own), dim=2)


def grow_mask_triton(mask: Tensor | None, parents: Tensor) -> Tensor:
    """Compute `grow_mask` with one Triton kernel, one program per row."""
    batch, width = parents.shape
    seen = 0 if mask is None else mask.shape[2]
    grown = torch.empty((batch, width, seen + width), dtype=torch.uint8, device=parents.device)
    _mask_kernel[(batch * width,)](
        grown if mask is None else mask,
        parents,
        grown,
        seen,
        WIDTH=width,
        BLOCK=next_power_of_2(seen + width),
        num_warps=1,
    )
    return grown


@triton.jit
def _mask_kernel(mask_ptr, parents_ptr, grown_ptr, seen, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    above = column < seen
    parent = tl.load(parents_ptr + row)
    inherited = tl.load(mask_ptr + parent * seen + column, mask=above, other=0)
    own = (column == seen + row % WIDTH).to(tl.uint8)
    grown = tl.where(above, inherited, own)
    tl.store(grown_ptr + row * (seen + WIDTH) + column, grown, mask=column < seen + WIDTH)
