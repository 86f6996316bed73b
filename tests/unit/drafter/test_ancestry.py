"""Who sees whom among the draft rows of a tree that is run level by level."""

from __future__ import annotations

from outrider_drafter.proposers.tree_growth import Frontier
from outrider_drafter.proposers.tree_visibility import Ancestry


def seen(visible: object) -> list[list[int]]:
    """Columns that each row sees."""
    assert hasattr(visible, "tolist")
    return [[i for i, sees in enumerate(row) if sees] for row in visible.tolist()]


def test_a_row_sees_its_ancestors_and_itself() -> None:
    ancestry = Ancestry()
    assert seen(ancestry.extend(0, Frontier((1, 2, 3), (0, 0, 0)))) == [[0], [1], [2]]
    assert seen(ancestry.extend(0, Frontier((4, 5), (2, 0)))) == [[2, 3], [0, 4]]
    assert seen(ancestry.extend(0, Frontier((6, 7, 8), (1, 1, 0)))) == [
        [0, 4, 5],
        [0, 4, 6],
        [2, 3, 7],
    ]


def test_a_chain_needs_no_mask() -> None:
    ancestry = Ancestry()
    for token in range(4):
        assert ancestry.extend(0, Frontier((token,), (0,))) is None


def test_a_lone_row_of_a_tree_that_branched_before_sees_its_own_branch_only() -> None:
    ancestry = Ancestry()
    ancestry.extend(0, Frontier((1, 2), (0, 0)))
    assert seen(ancestry.extend(0, Frontier((3,), (1,)))) == [[1, 2]]
    assert seen(ancestry.extend(0, Frontier((4,), (0,)))) == [[1, 2, 3]]


def test_a_tree_that_branches_late_has_its_trunk_in_common() -> None:
    ancestry = Ancestry()
    assert ancestry.extend(0, Frontier((1,), (0,))) is None
    assert seen(ancestry.extend(0, Frontier((2, 3), (0, 0)))) == [[0, 1], [0, 2]]


def test_slots_know_nothing_of_each_other() -> None:
    ancestry = Ancestry()
    ancestry.extend(0, Frontier((1, 2), (0, 0)))
    assert ancestry.extend(1, Frontier((1,), (0,))) is None
    assert seen(ancestry.extend(0, Frontier((3, 4), (0, 1)))) == [[0, 2], [1, 3]]
