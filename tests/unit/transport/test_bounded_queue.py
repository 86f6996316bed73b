from __future__ import annotations

import asyncio

import pytest

from outrider.errors import ConnectionLostError
from outrider.transport.bounded_queue import BoundedQueue
from tests.waiting import soon

LOST = ConnectionLostError("gone", reason="PEER_LOST")


async def test_items_come_out_in_the_order_they_went_in() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue(max_items=3)

    async def fill() -> None:
        for item in range(20):
            await mailbox.put(item)

    filling = asyncio.create_task(fill())
    assert [await mailbox.get() for _ in range(20)] == list(range(20))
    await filling


async def test_put_waits_while_the_number_of_items_is_at_its_bound() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue(max_items=2)
    await mailbox.put(0)
    await mailbox.put(1)
    blocked = asyncio.create_task(mailbox.put(2))
    await asyncio.sleep(0)
    assert not blocked.done()
    assert await mailbox.get() == 0
    await soon(blocked)


async def test_put_waits_while_the_size_of_items_is_at_its_bound() -> None:
    mailbox: BoundedQueue[bytes] = BoundedQueue(max_items=100, max_size=10, size_of=len)
    await mailbox.put(b"x" * 8)
    blocked = asyncio.create_task(mailbox.put(b"y" * 8))
    await asyncio.sleep(0)
    assert not blocked.done()
    await mailbox.get()
    await soon(blocked)


async def test_an_item_larger_than_the_bound_passes_alone() -> None:
    mailbox: BoundedQueue[bytes] = BoundedQueue(max_size=10, size_of=len)
    await soon(mailbox.put(b"x" * 100))
    assert await mailbox.get() == b"x" * 100


async def test_small_items_all_pass_once_a_large_one_is_gone() -> None:
    mailbox: BoundedQueue[bytes] = BoundedQueue(max_size=10, size_of=len)
    await mailbox.put(b"x" * 10)
    blocked = [asyncio.create_task(mailbox.put(b"y")) for _ in range(5)]
    await asyncio.sleep(0)
    await mailbox.get()
    await soon(asyncio.gather(*blocked))


async def test_close_hands_out_what_is_left_and_then_raises() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue()
    await mailbox.put(1)
    mailbox.close(LOST)
    assert await mailbox.get() == 1
    for _ in range(2):
        with pytest.raises(ConnectionLostError, match="gone") as caught:
            await mailbox.get()
        assert caught.value is not LOST and caught.value.reason == "PEER_LOST"
    with pytest.raises(ConnectionLostError):
        await mailbox.put(2)


async def test_close_wakes_everyone_who_waits() -> None:
    empty: BoundedQueue[int] = BoundedQueue()
    getters = [asyncio.create_task(empty.get()) for _ in range(3)]
    full: BoundedQueue[int] = BoundedQueue(max_items=1)
    await full.put(0)
    putters = [asyncio.create_task(full.put(1)) for _ in range(3)]
    await asyncio.sleep(0)
    empty.close(LOST)
    full.close(LOST)
    results = await soon(asyncio.gather(*getters, *putters, return_exceptions=True))
    assert [type(result) for result in results] == [ConnectionLostError] * 6


async def test_close_with_discard_drops_what_is_left() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue()
    await mailbox.put(1)
    mailbox.close(LOST, discard=True)
    with pytest.raises(ConnectionLostError):
        await mailbox.get()


async def test_a_cancelled_get_loses_no_item_and_no_wake_up() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue()
    first = asyncio.create_task(mailbox.get())
    second = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    await mailbox.put(1)
    first.cancel()
    assert await soon(second) == 1
    assert first.cancelled() or first.done()


async def test_a_cancelled_put_adds_nothing() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue(max_items=1)
    await mailbox.put(0)
    blocked = asyncio.create_task(mailbox.put(1))
    await asyncio.sleep(0)
    blocked.cancel()
    await asyncio.wait((blocked,))
    assert await mailbox.get() == 0
    assert len(mailbox) == 0


async def test_take_returns_what_is_there_within_both_bounds() -> None:
    mailbox: BoundedQueue[bytes] = BoundedQueue(size_of=len)
    for item in (b"aa", b"bb", b"cc", b"d" * 50):
        await mailbox.put(item)
    assert mailbox.take_some(10, 4) == [b"aa", b"bb"]
    assert mailbox.take_some(1, 100) == [b"cc"]
    assert mailbox.take_some(10, 4) == [b"d" * 50]
    assert mailbox.take_some(10, 4) == []


async def test_wait_tells_whether_there_is_anything_to_take() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue()
    assert not await mailbox.wait(0.01)
    await mailbox.put(1)
    assert await mailbox.wait(0.01)
    mailbox.take_some(1, 0)
    mailbox.close(LOST)
    assert await mailbox.wait(0.01)


async def test_an_offer_takes_room_or_leaves_all_as_it_was() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue(max_items=1)
    getting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    assert mailbox.try_put(1)
    assert await soon(getting) == 1
    assert mailbox.try_put(2)
    assert not mailbox.try_put(3)
    assert [await mailbox.get()] == [2] and len(mailbox) == 0
    mailbox.close(ConnectionLostError("closed", reason="CLOSED"))
    with pytest.raises(ConnectionLostError):
        mailbox.try_put(4)


async def test_items_offered_together_go_in_together_or_not_at_all() -> None:
    mailbox: BoundedQueue[bytes] = BoundedQueue(max_items=2, max_size=100, size_of=len)
    assert mailbox.try_put()
    assert mailbox.try_put(b"a" * 60, b"b" * 60, b"c" * 60)
    assert not mailbox.try_put(b"d", b"e")
    assert len(mailbox) == 3
    assert [len(await mailbox.get()) for _ in range(3)] == [60, 60, 60]
    assert mailbox.try_put(b"d")


async def test_every_waiter_gets_one_of_the_items_offered_together() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue()
    getting = [asyncio.create_task(mailbox.get()) for _ in range(2)]
    waiting = asyncio.create_task(mailbox.wait(10))
    await asyncio.sleep(0)
    assert mailbox.try_put(1, 2, 3)
    assert await soon(asyncio.gather(*getting)) == [1, 2]
    assert await soon(waiting)
    assert mailbox.take_all() == [3]


async def test_taking_all_makes_room_for_all_who_wait() -> None:
    mailbox: BoundedQueue[int] = BoundedQueue(max_items=2)
    assert mailbox.try_put(1, 2)
    putting = [asyncio.create_task(mailbox.put(number)) for number in (3, 4)]
    await asyncio.sleep(0)
    assert mailbox.take_all() == [1, 2]
    await soon(asyncio.gather(*putting))
    mailbox.close(LOST)
    assert mailbox.take_all() == [3, 4]
    assert mailbox.take_all() == []
