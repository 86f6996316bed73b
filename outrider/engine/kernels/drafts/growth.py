# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Dynamic draft tree growth of EAGLE-2 on the device (Li et al. 2024), over fp32 log-prob sums.

Every frontier row adds k candidates to a list. The best F candidates of a level are the next
frontier, and the best n of the whole list are the tree (`tree_rank`). Scores are sums of log-probs,
because products of probabilities near 1 would become equal by rounding. Ties go to the lower
candidate index: a child never has a higher score than its parent and always comes after it, so it
cannot be chosen without it.

B sessions, P rows of a step, k candidates per row, C candidates in total, F rows of the next step.
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
"""Number of candidates that a program compares with all of its own at a time."""


class TreeCandidates(NamedTuple):
    """Candidate list of a draft tree, filled level by level; a candidate with score -inf does not
    exist."""

    scores: Tensor
    """float32 [B, C]: sum of log-probs along the path, <= 0."""
    columns: Tensor
    """int32 [B, C]: draft id of each candidate."""
    parents: Tensor
    """int32 [B, C]: candidate index of the parent; ROOT on the first level."""


class FrontierRows(NamedTuple):
    """Frontier rows of one step, best first."""

    nodes: Tensor
    """int32 [B, F]: candidate index of each row."""
    columns: Tensor
    """int32 [B, F]: draft id of each row."""
    parents: Tensor
    """int32 [B, F]: the parent's row, b * P + p, of the previous step."""
    scores: Tensor
    """float32 [B, F]: score of each row's candidate."""


def num_candidates(top_k: int, width: int, depth: int) -> int:
    """Return the number of candidates of a tree of `depth` levels whose steps run `width` rows."""
    return top_k + (depth - 1) * width * top_k


def empty_candidates(batch: int, count: int, device: torch.device) -> TreeCandidates:
    """Return a candidate list with space for `count` candidates per session."""
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
    """Store the candidates of a level at `first` .. first + P*k, and return the best `width` of
    them.

    logprobs: float32 [B*P, k], and columns: int32 [B*P, k], of the rows of the step. A log-prob
    above 0 counts as 0, NaN as -inf. above: the rows of the step, or None for the root (P = 1).
    width: at most P*k. If there are fewer candidates, the result is padded with rows of score -inf,
    whose children do not exist either.
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
    """Compute `select_frontier` by PyTorch operators."""
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
    """Compute `select_frontier` in one kernel. A program per session ranks the candidates of a
    level: the rank of a candidate is the number of candidates with a higher score."""
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
    """Return the cumulative scores of the candidates `index` of one session's level; -inf for
    indices out of range."""
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
    """Return which draft rows each row of the next step attends to, uint8 [B, F, W + F]: the rows
    that its parent attends to, and itself.

    mask: uint8 [B, P, W], the mask of the previous step; None if there was none (W = 0). parents:
    int32 [B, F], see `FrontierRows`.
    """
    return (grow_mask_triton if parents.is_cuda else grow_mask_torch)(mask, parents)


def grow_mask_torch(mask: Tensor | None, parents: Tensor) -> Tensor:
    """Compute `grow_mask` by PyTorch operators."""
    batch, width = parents.shape
    own = torch.eye(width, dtype=torch.uint8, device=parents.device).expand(batch, -1, -1)
    if mask is None:
        return own.contiguous()
    return torch.cat((mask.flatten(0, 1)[parents.long()], own), dim=2)


def grow_mask_triton(mask: Tensor | None, parents: Tensor) -> Tensor:
    """Compute `grow_mask` in one kernel, one program per row."""
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
