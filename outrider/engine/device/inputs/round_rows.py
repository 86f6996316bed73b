"""Columns of a round's decoding rows: sessions and the host's drafts for them.

n rows, D nodes of all drafts together (roots are not counted).
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
    """The host's draft."""
    distribution: DraftDistribution | None = None
    """What it was drawn from; only the rejection rule looks at it."""


class RoundRows(NamedTuple):
    """Rows of one launch."""

    slots: list[int]
    counts: NDArray[np.int64]
    """[n]: nodes of each row's draft, 0 without one."""
    tokens: NDArray[np.int32]
    """[D], row after row."""
    parents: NDArray[np.int32]
    """[D], within the same draft."""
    distributions: Sequence[DraftDistribution | None] | None = None
    """[n]; None: no row has one."""
    allowed_tokens: Sequence[NDArray[np.uint32] | None] | None = None
    """[n], each [1 + its nodes, W]: what grammars allow after roots and nodes; None: there are
    none."""

    @classmethod
    def of_rows(cls, rows: Sequence[RoundRow]) -> RoundRows:
        """Rows that were put together one by one."""
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
        """Rows without drafts from the host."""
        return cls(slots, np.zeros(len(slots), dtype=np.int64), _NONE, _NONE)

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest draft."""
        if len(self.slots) == 1:
            return len(self.tokens)
        return int(self.counts.max()) if len(self.tokens) else 0

    @property
    def draft_kind(self) -> DraftKind:
        """What the drafts have in common."""
        if not len(self.tokens):
            return DraftKind.NONE
        if len(self.slots) == 1:
            # Plain numbers are faster than arrays.
            alone = self.parents.tolist() == list(range(-1, len(self.tokens) - 1))
            return DraftKind.CHAIN if alone else DraftKind.TREE
        chains = bool((self.parents == chain_parents(self.counts)).all())
        return DraftKind.CHAIN if chains else DraftKind.TREE
