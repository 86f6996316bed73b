"""DraftForest: draft rows of many trees, run through a model on the host level by level.

Under the root of each session hangs a tree of draft rows: a draft for its present prefix, or the
nodes of its pending proposal and, below them, the drafts for its outcomes. A row attends to its
session's real rows, its ancestors and itself; no prefix is copied. Rows are numbered in order of
creation, the roots first. R rows of a step, D draft rows of a session.
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
    """The rows of one session in a step."""

    tree_index: int
    """Number of its root."""
    first: int
    """First row in the step."""
    size: int
    visible: NDArray[np.bool_] | None
    """[size, D], these rows the last: which draft rows they see; None: all, as in a chain."""


class DraftForest(ABC):
    """Draft rows of some sessions, below their roots; base class for each kind of model."""

    target_ids: Tensor | None = None
    """Target id of every draft id, int64 [Vd]; None if the vocabulary is the target's."""

    def __init__(self, bases: Sequence[int]) -> None:
        """`bases` [L]: the position of the first level below each root."""
        self._bases = bases
        self._owners = list(range(len(bases)))
        self._depths = [0] * len(bases)
        self._places = [-1] * len(bases)
        """Index of each row among the draft rows of its session; -1: a root."""
        self._visible = [np.zeros((0, 0), dtype=np.bool_) for _ in bases]
        """[D, D] of each session."""
        self._marked = 0

    def __len__(self) -> int:
        return len(self._owners)

    @abstractmethod
    def root_logits(self) -> Tensor:
        """Logits [L, Vd] below the roots."""

    @abstractmethod
    def rows_left(self, owner: int) -> int:
        """Draft rows that there is still room for below a root."""

    @abstractmethod
    def levels_left(self, owner: int) -> int:
        """Levels below a root that can be drafted."""

    def step(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Run R rows below others, those of one session together; logits [R, Vd]."""
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
        """What new rows of a session see, and note them; None: all."""
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
        """The rows so far are what `restore_checkpoint` goes back to."""
        self._marked = len(self)

    def restore_checkpoint(self) -> None:
        """Drop all rows since the mark."""
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
        """Run these rows and keep their KV; logits [R, Vd]."""

    @abstractmethod
    def _drop(self, kept: Sequence[int]) -> None:
        """Forget all but the first kept[i] draft rows of each session."""


class ForestTrees:
    """Trees that grow together, each below a row of its own in a forest; a `TreeDraftModel`."""

    def __init__(self, forest: DraftForest, first_row: int, logits: Tensor) -> None:
        """Slot i grows below row first_row + i, whose logits are logits [slots, Vd]."""
        self.target_ids = forest.target_ids
        self._forest = forest
        self._logits = logits
        self._first_row = {slot: first_row + slot for slot in range(len(logits))}
        """First row of each slot in the previous step."""

    @classmethod
    def below_roots(cls, forest: DraftForest) -> ForestTrees:
        """Drafts for the present prefixes: slot i is the forest's root i."""
        return cls(forest, 0, forest.root_logits())

    @classmethod
    def below_outcomes(
        cls, forest: DraftForest, tokens: Sequence[int], parents: Sequence[int]
    ) -> ForestTrees:
        """Drafts for outcomes: slot i is tokens[i] after the row parents[i]."""
        first_row = len(forest)
        return cls(forest, first_row, forest.step(tokens, parents))

    def root_logits(self) -> Tensor:
        """Logits [slots, Vd] below the slots' rows."""
        return self._logits

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        """Run one level; logits [R, Vd]."""
        tokens: list[int] = []
        parents: list[int] = []
        first_row: dict[int, int] = {}
        for slot, frontier in frontiers:
            first_row[slot] = len(self._forest) + len(tokens)
            tokens += frontier.tokens
            parents += [self._first_row[slot] + parent for parent in frontier.parents]
        self._first_row = first_row
        return self._forest.step(tokens, parents)
