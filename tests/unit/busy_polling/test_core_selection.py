"""Which cores are claimed first."""

from __future__ import annotations

import pytest

from outrider.busy_polling.core_selection import claim_order, parse_core_list


def test_the_highest_cores_come_first() -> None:
    assert claim_order({0, 3, 1, 2}, {}) == [3, 2, 1, 0]


def test_second_hardware_threads_come_after_all_physical_cores() -> None:
    siblings = {core: {core, core ^ 1} for core in range(6)}
    assert claim_order(range(6), siblings) == [5, 3, 1, 4, 2, 0]


def test_a_sibling_that_may_not_be_used_is_not_claimed() -> None:
    siblings = {2: {2, 34}, 3: {3, 35}}
    assert claim_order({2, 3}, siblings) == [3, 2]


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0-2", {0, 1, 2}), ("1,33\n", {1, 33}), ("0-1,8-9", {0, 1, 8, 9}), ("", set())],
)
def test_core_lists_of_the_kernel_are_read(text: str, cores: set[int]) -> None:
    assert parse_core_list(text) == cores


def test_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="x"):
        parse_core_list("0-x")
