"""Concurrent callers with equal keys share one computation; failures are not kept."""

from __future__ import annotations

import asyncio

import pytest
from outrider_router.requests.shared_results import MAX_KEPT, SharedResults


async def test_concurrent_and_later_callers_share_a_result() -> None:
    results, gate, calls = SharedResults[str, int](), asyncio.Event(), 0

    async def compute() -> int:
        nonlocal calls
        calls += 1
        await gate.wait()
        return calls

    asked = [asyncio.create_task(results.get_result("a", compute)) for _ in range(128)]
    await asyncio.sleep(0)
    asked.pop().cancel()
    gate.set()
    assert await asyncio.gather(*asked) == [1] * 127
    assert await results.get_result("a", compute) == 1
    assert await results.get_result("b", compute) == 2


async def test_an_error_reaches_all_who_wait_and_is_forgotten() -> None:
    results, errors = SharedResults[str, int](), [ValueError("first")]

    async def compute() -> int:
        await asyncio.sleep(0)
        if errors:
            raise errors.pop()
        return 5

    both = await asyncio.gather(
        *(results.get_result("a", compute) for _ in range(2)), return_exceptions=True
    )
    assert [str(each) for each in both] == ["first", "first"]
    assert await results.get_result("a", compute) == 5


async def test_the_oldest_results_are_dropped() -> None:
    results, calls = SharedResults[int, int](), []

    async def compute() -> int:
        calls.append(1)
        return len(calls)

    for key in range(MAX_KEPT + 1):
        await results.get_result(key, compute)
    await results.get_result(MAX_KEPT, compute)
    assert len(calls) == MAX_KEPT + 1
    await results.get_result(0, compute)
    assert len(calls) == MAX_KEPT + 2


async def test_a_cancelled_caller_does_not_cancel_the_others() -> None:
    results, gate = SharedResults[str, int](), asyncio.Event()

    async def compute() -> int:
        await gate.wait()
        return 1

    first = asyncio.create_task(results.get_result("a", compute))
    second = asyncio.create_task(results.get_result("a", compute))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 1
