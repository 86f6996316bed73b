"""One session's rows in a round: depth limits, trimming, positions and masks (pure, numpy).

N nodes of a proposal's tree; row 0 is the root, row 1 + i is node i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.spec.draft_distribution import DraftDistribution, make_distribution
from outrider.spec.tree import DraftTree, ancestor_mask, depths, is_chain
from outrider.wire.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyDraft:
    """The part of a proposal that a round verifies."""

    tree: DraftTree
    distribution: DraftDistribution | None

    @property
    def depths(self) -> NDArray[np.int32]:
        """int32 [N], 1 for the first level."""
        return depths(self.tree.parents)


def trim_draft(
    tree: DraftTree, distribution: DraftDistribution | None, max_depth: int
) -> VerifyDraft:
    """Drop nodes deeper than `max_depth`.

    The cut looks at depths alone, never at tokens: so what remains of a sampled tree still
    follows its draft law.
    """
    # No node is deeper than there are nodes.
    if len(tree.tokens) <= max_depth:
        return VerifyDraft(tree=tree, distribution=distribution)
    node_depths = depths(tree.parents)
    if len(tree.tokens) == 0 or int(node_depths.max()) <= max_depth:
        return VerifyDraft(tree=tree, distribution=distribution)
    kept = np.flatnonzero(node_depths <= max_depth).astype(np.int32)
    number = np.full(len(tree) + 1, -1, dtype=np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    # A kept node's parent is less deep, so it is kept; ROOT (-1) reads the last entry, -1.
    parents = number[tree.parents[kept]]
    trimmed = DraftTree(tree.tokens[kept], parents, tree.logprobs[kept])
    cut_distribution = None
    if distribution is not None:
        slots = {0: distribution.entries(0)} if len(kept) else {}
        slots |= {
            new + 1: distribution.entries(int(old) + 1)
            for new, old in enumerate(kept)
            if node_depths[old] < max_depth and len(distribution.entries(int(old) + 1)[0])
        }
        cut_distribution = make_distribution(len(kept), slots)
    return VerifyDraft(tree=trimmed, distribution=cut_distribution)


def tree_mask(tree: DraftTree) -> NDArray[np.bool_] | None:
    """bool [1 + N, 1 + N] over root and nodes; None for a chain, whose mask is causal."""
    if is_chain(tree.parents):
        return None
    count = len(tree)
    mask = np.zeros((count + 1, count + 1), dtype=np.bool_)
    mask[:, 0] = True
    mask[1:, 1:] = ancestor_mask(tree.parents)
    return mask


def truncate_emission(
    tokens: Sequence[int], *, stop_ids: frozenset[int], remaining: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut a round's tokens at a stop token (which is emitted) and at the token budget."""
    taken = tuple(tokens[:remaining])
    for index, token in enumerate(taken):
        if token in stop_ids:
            return taken[: index + 1], FinishReason.STOP_TOKEN
    return taken, FinishReason.LENGTH if len(taken) == remaining else None
