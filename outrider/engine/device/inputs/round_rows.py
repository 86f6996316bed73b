"""Columns of a round's decoding rows: sessions and the host's drafts for them.

Shapes: n rows, D nodes of all drafts together without roots, W words of a token mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.graphs.shapes import DraftKind
from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.tree import DraftTree, chain_parents

_NONE: Final = np.empty(0, dtype=np.int32)


class RoundRow(NamedTuple):
    """One session's row of a round."""

    slot: int
    tree: DraftTree | None = None
    """Draft from the host; None without one."""
    distribution: DraftDistribution | None = None
    """Distribution that the draft was drawn from, used by the rejection rule only."""


class RoundRows(NamedTuple):
    """Decoding rows of one launch, as columns."""

    slots: list[int]
    counts: NDArray[np.int64]
    """[n]: number of nodes of each row's draft, 0 without a draft."""
    tokens: NDArray[np.int32]
    """[D]: draft tokens, row after row."""
    parents: NDArray[np.int32]
    """[D]: index of each node's parent within the same draft."""
    distributions: Sequence[DraftDistribution | None] | None = None
    """[n]: draft distributions; None if no row has one."""
    allowed_tokens: Sequence[NDArray[np.uint32] | None] | None = None
    """[n]: masks [1 + nodes of the row, W] of the tokens that the grammar allows after the root and
    each node. None if no row has a grammar."""

    @classmethod
    def of_rows(cls, rows: Sequence[RoundRow]) -> RoundRows:
        """Return the columns of a list of rows."""
        trees = [row.tree for row in rows if row.tree is not None]
        return cls(
            slots=[row.slot for row in rows],
            counts=np.array([0 if row.tree is None else len(row.tree) for row in rows], np.int64),
            tokens=np.concatenate([_NONE, *(tree.tokens for tree in trees)]),
            parents=np.concatenate([_NONE, *(tree.parents for tree in trees)]),
            distributions=[row.distribution for row in rows]
            if any(row.distribution is not None for row in rows)
            else None,
        )

    @classmethod
    def without_drafts(cls, slots: list[int]) -> RoundRows:
        """Return rows without drafts from the host."""
        return cls(slots, np.zeros(len(slots), dtype=np.int64), _NONE, _NONE)

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the largest draft."""
        if len(self.slots) == 1:
            return len(self.tokens)
        return int(self.counts.max()) if len(self.tokens) else 0

    @property
    def draft_kind(self) -> DraftKind:
        """Kind of draft that covers all rows: NONE, CHAIN or TREE."""
        if not len(self.tokens):
            return DraftKind.NONE
        if len(self.slots) == 1:
            # A list is faster than an array here.
            alone = self.parents.tolist() == list(range(-1, len(self.tokens) - 1))
            return DraftKind.CHAIN if alone else DraftKind.TREE
        chains = bool((self.parents == chain_parents(self.counts)).all())
        return DraftKind.CHAIN if chains else DraftKind.TREE
