"""Requests that arrive together enter one a turn of the event loop, in their order."""

from __future__ import annotations

import asyncio

from outrider_router.admission.queue import ArrivalQueue


async def test_one_enters_at_once() -> None:
    queue = ArrivalQueue()
    for _ in range(3):
        entering = queue.wait_turn()
        # It does not wait: the coroutine ends with its first step.
        try:
            entering.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waits")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_those_that_come_together_enter_one_a_turn_in_their_order() -> None:
    queue, entered, turns = ArrivalQueue(), list[tuple[int, int]](), 0

    async def request(number: int) -> None:
        await queue.wait_turn()
        entered.append((number, turns))

    tasks = [asyncio.create_task(request(number)) for number in range(50)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns += 1
    assert [number for number, _ in entered] == list(range(50))
    times = [turn for _, turn in entered]
    assert len(set(times)) == 50 and len(queue) == 0


async def test_one_that_leaves_keeps_nobody_waiting() -> None:
    queue = ArrivalQueue()
    tasks = [asyncio.create_task(queue.wait_turn()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[2:8]:
        task.cancel()
    async with asyncio.timeout(5.0):
        await asyncio.gather(*tasks, return_exceptions=True)
        await queue.wait_turn()
    assert sum(task.cancelled() for task in tasks) == 6
