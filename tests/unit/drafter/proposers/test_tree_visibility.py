"""Who sees whom among the draft rows of a tree that is run level by level."""

from __future__ import annotations

from outrider_drafter.proposers.forest import TreeVisibility
from outrider_drafter.proposers.tree_growth import StepFrontier


def seen(visible: object) -> list[list[int]]:
    """Columns that each row sees."""
    assert hasattr(visible, "tolist")
    return [[i for i, sees in enumerate(row) if sees] for row in visible.tolist()]


def test_a_row_sees_its_ancestors_and_itself() -> None:
    ancestry = TreeVisibility()
    assert seen(ancestry.add_rows(0, StepFrontier((1, 2, 3), (0, 0, 0)))) == [[0], [1], [2]]
    assert seen(ancestry.add_rows(0, StepFrontier((4, 5), (2, 0)))) == [[2, 3], [0, 4]]
    assert seen(ancestry.add_rows(0, StepFrontier((6, 7, 8), (1, 1, 0)))) == [
        [0, 4, 5],
        [0, 4, 6],
        [2, 3, 7],
    ]


def test_a_chain_needs_no_mask() -> None:
    ancestry = TreeVisibility()
    for token in range(4):
        assert ancestry.add_rows(0, StepFrontier((token,), (0,))) is None


def test_a_lone_row_of_a_tree_that_branched_before_sees_its_own_branch_only() -> None:
    ancestry = TreeVisibility()
    ancestry.add_rows(0, StepFrontier((1, 2), (0, 0)))
    assert seen(ancestry.add_rows(0, StepFrontier((3,), (1,)))) == [[1, 2]]
    assert seen(ancestry.add_rows(0, StepFrontier((4,), (0,)))) == [[1, 2, 3]]


def test_a_tree_that_branches_late_has_its_trunk_in_common() -> None:
    ancestry = TreeVisibility()
    assert ancestry.add_rows(0, StepFrontier((1,), (0,))) is None
    assert seen(ancestry.add_rows(0, StepFrontier((2, 3), (0, 0)))) == [[0, 1], [0, 2]]


def test_slots_know_nothing_of_each_other() -> None:
    ancestry = TreeVisibility()
    ancestry.add_rows(0, StepFrontier((1, 2), (0, 0)))
    assert ancestry.add_rows(1, StepFrontier((1,), (0,))) is None
    assert seen(ancestry.add_rows(0, StepFrontier((3, 4), (0, 1)))) == [[0, 2], [1, 3]]
