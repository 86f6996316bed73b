"""DraftForest: draft rows of many trees, run through a model on the host level by level.

Each session has a root, and below the root a tree of draft rows: either a draft for the session's
current prefix, or the nodes of its pending proposal with the drafts for the proposal's outcomes
below them. A row attends to its session's real rows, to its ancestors and to itself; no prefix is
copied. Rows are numbered in order of creation, the roots first. Letters in shapes: L roots; R rows
of a step; D draft rows of a session; Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider_drafter.proposers.tree_growth import StepFrontier


class StepRows(NamedTuple):
    """The draft rows of one session among the rows that one call of `DraftForest.step` runs."""

    tree_index: int
    """Index of the session among the roots of the forest."""
    first: int
    """Index of the session's first row among the rows of the step."""
    size: int
    visible: NDArray[np.bool_] | None
    """bool [size, D]: which of the session's D draft rows each of these rows attends to. The last
    columns are the rows of the step themselves. None if there is a single row and it attends to all
    draft rows, as in a chain."""


class DraftForest(ABC):
    """Base class for the draft rows of several sessions. The rows of a session form trees below its
    root. Each kind of draft model has a subclass that runs the rows."""

    target_ids: Tensor | None = None
    """Target id of every draft id, int64 [Vd]; None if the vocabulary is the target's."""

    def __init__(self, bases: Sequence[int]) -> None:
        """Create a forest without draft rows. `bases` [L]: position of the first level below each
        root."""
        self._bases = bases
        self._owners = list(range(len(bases)))
        self._depths = [0] * len(bases)
        self._places = [-1] * len(bases)
        """Index of each row among the draft rows of its session; -1 for a root."""
        self._visible = [np.zeros((0, 0), dtype=np.bool_) for _ in bases]
        """bool [D, D] for each session: draft rows that each draft row attends to."""
        self._marked = 0

    def __len__(self) -> int:
        return len(self._owners)

    @abstractmethod
    def root_logits(self) -> Tensor:
        """Return the draft logits at all roots, [roots, draft vocabulary]."""

    @abstractmethod
    def rows_left(self, owner: int) -> int:
        """Return how many more draft rows can be added below root `owner`."""

    @abstractmethod
    def levels_left(self, owner: int) -> int:
        """Return the maximum number of levels that can be drafted below root `owner`."""

    def step(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Run R new rows and return their logits [R, draft vocabulary]. Row i has the token
        tokens[i] and becomes a child of the existing row with the number parents[i]. Rows of one
        session must be adjacent."""
        owners = [self._owners[parent] for parent in parents]
        depths = [self._depths[parent] for parent in parents]
        positions = [
            self._bases[owner] + depth for owner, depth in zip(owners, depths, strict=True)
        ]
        spans = []
        for owner, group in groupby(range(len(tokens)), key=owners.__getitem__):
            rows = list(group)
            visible = self._extend(owner, [self._places[parents[row]] for row in rows])
            spans.append(StepRows(owner, rows[0], len(rows), visible))
        logits = self._run(tokens, parents, positions, spans)
        self._owners += owners
        self._depths += [depth + 1 for depth in depths]
        return logits

    def _extend(self, owner: int, parents: Sequence[int]) -> NDArray[np.bool_] | None:
        """Add rows below `parents` to a session's attention mask. Return the mask of the new rows,
        or None if they attend to all draft rows."""
        above, size = self._visible[owner], len(parents)
        known = len(above)
        grown = np.zeros((known + size, known + size), dtype=np.bool_)
        grown[:known, :known] = above
        for row, parent in enumerate(parents, start=known):
            if parent >= 0:
                grown[row, :known] = above[parent]
            grown[row, row] = True
        self._visible[owner] = grown
        self._places += range(known, known + size)
        visible = grown[known:]
        return None if size == 1 and bool(visible.all()) else visible

    def save_checkpoint(self) -> None:
        """Mark the current rows as the state that `restore_checkpoint` returns to."""
        self._marked = len(self)

    def restore_checkpoint(self) -> None:
        """Drop all rows that were added since `save_checkpoint`."""
        for rows in (self._owners, self._depths, self._places):
            del rows[self._marked :]
        left = np.bincount(self._owners, minlength=len(self._bases)) - 1
        self._visible = [
            visible[:count, :count]
            for visible, count in zip(self._visible, left.tolist(), strict=True)
        ]
        self._drop(left.tolist())

    @abstractmethod
    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[StepRows],
    ) -> Tensor:
        """Run these rows, keep their KV and return their logits [R, Vd]."""

    @abstractmethod
    def _drop(self, kept: Sequence[int]) -> None:
        """Drop all but the first kept[i] draft rows of each session i."""


class ForestTrees:
    """Draft trees that grow together in a forest, each below a row of its own. It implements
    `TreeDraftModel`, so each tree is a slot."""

    def __init__(self, forest: DraftForest, first_row: int, logits: Tensor) -> None:
        """Create trees without nodes. Tree i grows below row first_row + i of the forest. `logits`
        [trees, draft vocabulary]: row i holds the logits at that row."""
        self.target_ids = forest.target_ids
        self._forest = forest
        self._logits = logits
        self._first_row = {slot: first_row + slot for slot in range(len(logits))}
        """Row number of each slot's first row in the previous step."""

    @classmethod
    def below_roots(cls, forest: DraftForest) -> ForestTrees:
        """Return trees for the current prefixes: slot i grows below root i of the forest."""
        return cls(forest, 0, forest.root_logits())

    @classmethod
    def below_outcomes(
        cls, forest: DraftForest, tokens: Sequence[int], parents: Sequence[int]
    ) -> ForestTrees:
        """Return trees for outcomes: slot i grows below a new row with tokens[i] and parent row
        parents[i]."""
        first_row = len(forest)
        return cls(forest, first_row, forest.step(tokens, parents))

    def root_logits(self) -> Tensor:
        """Return the logits [slots, Vd] at the rows below which the slots grow."""
        return self._logits

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        """Run one more level of several trees and return the logits [R, draft vocabulary] of its R
        rows; see `TreeDraftModel.step`."""
        tokens: list[int] = []
        parents: list[int] = []
        first_row: dict[int, int] = {}
        for slot, frontier in frontiers:
            first_row[slot] = len(self._forest) + len(tokens)
            tokens += frontier.tokens
            parents += [self._first_row[slot] + parent for parent in frontier.parents]
        self._first_row = first_row
        return self._forest.step(tokens, parents)
