"""Which draft rows see each other in a forest that is run level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from outrider_drafter.proposers.forest import StepRows
from torch import Tensor

from tests.fakes.unbounded_forest import UnboundedForest


class RecordingForest(UnboundedForest):
    """Records what the rows of the last step see."""

    def __init__(self, sessions: int = 1) -> None:
        super().__init__([0] * sessions)
        self.spans: Sequence[StepRows] = ()

    def root_logits(self) -> Tensor:
        return torch.zeros(1, 1)

    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[StepRows],
    ) -> Tensor:
        self.spans = spans
        return torch.zeros(len(tokens), 1)

    def seen(self, parents: Sequence[int]) -> list[list[int]] | None:
        """Columns that each row of a step sees, all of one session; None: all of them."""
        self.step([0] * len(parents), parents)
        (span,) = self.spans
        if span.visible is None:
            return None
        return [[i for i, sees in enumerate(row) if sees] for row in span.visible.tolist()]


def test_a_row_sees_its_ancestors_and_itself() -> None:
    forest = RecordingForest()
    assert forest.seen([0, 0, 0]) == [[0], [1], [2]]
    assert forest.seen([3, 1]) == [[2, 3], [0, 4]]
    assert forest.seen([5, 5, 4]) == [[0, 4, 5], [0, 4, 6], [2, 3, 7]]


def test_a_chain_needs_no_mask() -> None:
    forest = RecordingForest()
    for row in range(4):
        assert forest.seen([row]) is None


def test_a_lone_row_of_a_tree_that_branched_before_sees_its_own_branch_only() -> None:
    forest = RecordingForest()
    forest.seen([0, 0])
    assert forest.seen([2]) == [[1, 2]]
    assert forest.seen([3]) == [[1, 2, 3]]


def test_a_tree_that_branches_late_has_its_trunk_in_common() -> None:
    forest = RecordingForest()
    assert forest.seen([0]) is None
    assert forest.seen([1, 1]) == [[0, 1], [0, 2]]


def test_sessions_know_nothing_of_each_other() -> None:
    forest = RecordingForest(sessions=2)
    forest.seen([0, 0])
    assert forest.seen([1]) is None
    assert forest.seen([2, 3]) == [[0, 2], [1, 3]]


def test_rows_since_the_checkpoint_are_dropped() -> None:
    forest = RecordingForest()
    forest.seen([0])
    forest.save_checkpoint()
    forest.seen([1, 1])
    forest.restore_checkpoint()
    assert len(forest) == 2
    assert forest.seen([1]) is None
