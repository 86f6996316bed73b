"""Slow grammars and busy tenants leave room to others."""

from __future__ import annotations

import pytest

from outrider.grammar.compile_scheduler import (
    MAX_WAITING_FIRST,
    MAX_WAITING_SLOW,
    CompileScheduler,
    CompileTask,
)


def taken(shm_channels: CompileScheduler[str]) -> CompileTask[str]:
    turn = shm_channels.take()
    assert turn is not None
    return turn


def test_tenants_take_turns() -> None:
    shm_channels = CompileScheduler[str](1)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert shm_channels.add_first_try(item, item[0]) is None
    order = []
    for _ in range(6):
        turn = taken(shm_channels)
        assert shm_channels.take() is None, "the worker is busy"
        order.append(turn.item)
        shm_channels.finish(turn)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert shm_channels.take() is None


def test_in_a_full_lane_the_oldest_of_the_busiest_tenant_makes_way() -> None:
    shm_channels = CompileScheduler[str](1)
    assert shm_channels.add_first_try("b0", "b") is None
    displaced = [shm_channels.add_first_try(f"a{n}", "a") for n in range(MAX_WAITING_FIRST)]
    assert displaced == [None] * (MAX_WAITING_FIRST - 1) + ["a0"]
    assert shm_channels.add_first_try("c0", "c") == "a1"


@pytest.mark.parametrize("workers", [2, 3])
def test_slow_grammars_leave_a_worker_to_first_tries(workers: int) -> None:
    shm_channels = CompileScheduler[str](workers)
    for n in range(workers):
        assert shm_channels.add_full_compile(f"slow{n}")
    slow = [taken(shm_channels) for _ in range(workers - 1)]
    assert all(turn.is_slow for turn in slow)
    assert shm_channels.take() is None
    shm_channels.add_first_try("short", "a")
    assert taken(shm_channels) == CompileTask("short", is_slow=False)


def test_a_single_worker_serves_both_lanes_in_turn() -> None:
    shm_channels = CompileScheduler[str](1)
    for n in range(3):
        shm_channels.add_first_try(f"short{n}", "a")
        shm_channels.add_full_compile(f"slow{n}")
    kinds = []
    for _ in range(6):
        turn = taken(shm_channels)
        kinds.append(turn.is_slow)
        shm_channels.finish(turn)
    assert kinds == [True, False] * 3


def test_the_slow_lane_is_bounded_and_who_leaves_makes_room() -> None:
    shm_channels = CompileScheduler[str](2)
    assert all(shm_channels.add_full_compile(f"s{n}") for n in range(MAX_WAITING_SLOW))
    assert not shm_channels.add_full_compile("more")
    shm_channels.discard("s3")
    assert shm_channels.add_full_compile("more")
    shm_channels.add_first_try("a", "tenant")
    shm_channels.discard("a")
    assert taken(shm_channels).is_slow and shm_channels.take() is None
