"""Slow grammars and busy tenants leave room to others."""

from __future__ import annotations

import pytest

from outrider.grammar.compile_scheduler import (
    MAX_WAITING_FIRST,
    MAX_WAITING_SLOW,
    CompileLanes,
    Turn,
)


def taken(lanes: CompileLanes[str]) -> Turn[str]:
    turn = lanes.take()
    assert turn is not None
    return turn


def test_tenants_take_turns() -> None:
    lanes = CompileLanes[str](1)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert lanes.enter(item, item[0]) is None
    order = []
    for _ in range(6):
        turn = taken(lanes)
        assert lanes.take() is None, "the worker is busy"
        order.append(turn.item)
        lanes.finish(turn)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert lanes.take() is None


def test_in_a_full_lane_the_oldest_of_the_busiest_tenant_makes_way() -> None:
    lanes = CompileLanes[str](1)
    assert lanes.enter("b0", "b") is None
    displaced = [lanes.enter(f"a{n}", "a") for n in range(MAX_WAITING_FIRST)]
    assert displaced == [None] * (MAX_WAITING_FIRST - 1) + ["a0"]
    assert lanes.enter("c0", "c") == "a1"


@pytest.mark.parametrize("workers", [2, 3])
def test_slow_grammars_leave_a_worker_to_first_tries(workers: int) -> None:
    lanes = CompileLanes[str](workers)
    for n in range(workers):
        assert lanes.enter_slow(f"slow{n}")
    slow = [taken(lanes) for _ in range(workers - 1)]
    assert all(turn.is_slow for turn in slow)
    assert lanes.take() is None
    lanes.enter("short", "a")
    assert taken(lanes) == Turn("short", is_slow=False)


def test_a_single_worker_serves_both_lanes_in_turn() -> None:
    lanes = CompileLanes[str](1)
    for n in range(3):
        lanes.enter(f"short{n}", "a")
        lanes.enter_slow(f"slow{n}")
    kinds = []
    for _ in range(6):
        turn = taken(lanes)
        kinds.append(turn.is_slow)
        lanes.finish(turn)
    assert kinds == [True, False] * 3


def test_the_slow_lane_is_bounded_and_who_leaves_makes_room() -> None:
    lanes = CompileLanes[str](2)
    assert all(lanes.enter_slow(f"s{n}") for n in range(MAX_WAITING_SLOW))
    assert not lanes.enter_slow("more")
    lanes.discard("s3")
    assert lanes.enter_slow("more")
    lanes.enter("a", "tenant")
    lanes.discard("a")
    assert taken(lanes).is_slow and lanes.take() is None
