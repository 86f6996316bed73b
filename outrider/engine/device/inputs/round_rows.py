"""Decoding rows of a round: the session slot of each row, and the draft that the host has for it.

Shapes: n rows, D draft tokens of all rows together, W words of a token mask.
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
    """One decoding session of a round: its slot and its draft."""

    slot: int
    tree: DraftTree | None = None
    """Draft from the host; None without one."""
    distribution: DraftDistribution | None = None
    """Distribution that the draft was drawn from, used by the rejection rule only."""


class RoundRows(NamedTuple):
    """Decoding rows of one launch, stored as one array for each field of `RoundRow`."""

    slots: list[int]
    counts: NDArray[np.int64]
    """[n]: number of draft tokens of each row, 0 without a draft."""
    tokens: NDArray[np.int32]
    """[D]: draft tokens, row after row."""
    parents: NDArray[np.int32]
    """[D]: index of each draft token's parent among the tokens of the same draft; -1 for children
    of the root."""
    distributions: Sequence[DraftDistribution | None] | None = None
    """[n]: draft distributions; None if no row has one."""
    allowed_tokens: Sequence[NDArray[np.uint32] | None] | None = None
    """[n]: masks [1 + nodes of the row, W] of the tokens that the grammar allows after the root and
    each node. None if no row has a grammar."""

    @classmethod
    def of_rows(cls, rows: Sequence[RoundRow]) -> RoundRows:
        """Build the arrays from a list of rows."""
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
        """Number of tokens of the largest draft, without the root; 0 if there are no drafts."""
        if len(self.slots) == 1:
            return len(self.tokens)
        return int(self.counts.max()) if len(self.tokens) else 0

    @property
    def draft_kind(self) -> DraftKind:
        """NONE if no row has a draft, CHAIN if all drafts are chains, otherwise TREE."""
        if not len(self.tokens):
            return DraftKind.NONE
        if len(self.slots) == 1:
            # A list is faster than an array here.
            alone = self.parents.tolist() == list(range(-1, len(self.tokens) - 1))
            return DraftKind.CHAIN if alone else DraftKind.TREE
        chains = bool((self.parents == chain_parents(self.counts)).all())
        return DraftKind.CHAIN if chains else DraftKind.TREE
