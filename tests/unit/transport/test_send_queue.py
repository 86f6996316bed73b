"""Messages of callers that cannot wait."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import ConnectionLostError
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.send_queue import SendQueue
from outrider.wire.limits import MAX_BUNDLE_BYTES
from tests.waiting import soon


class Pipe:
    """A connection with room for two messages."""

    peer = "pipe"

    def __init__(self) -> None:
        self.wire: BoundedQueue[int] = BoundedQueue(max_items=2)
        self.offered: list[tuple[int, ...]] = []

    async def send(self, message: int) -> None:
        await self.wire.put(message)

    def try_send(self, *messages: int) -> bool:
        self.offered.append(messages)
        return self.wire.try_put(*messages)

    async def receive(self) -> int:
        return await self.wire.get()

    def receive_ready(self) -> list[int]:
        return self.wire.take_all()

    async def close(self) -> None:
        self.wire.close(ConnectionLostError("closed", reason="CLOSED"))


async def test_a_message_leaves_at_once_while_there_is_room() -> None:
    pipe = Pipe()
    outgoing = SendQueue(pipe, size_of=lambda message: message)
    outgoing.put_messages(1)
    outgoing.put_messages(2)
    assert (len(pipe.wire), len(outgoing), outgoing.size) == (2, 0, 0)
    outgoing.put_messages(30)
    outgoing.put_messages(40)
    assert (len(pipe.wire), len(outgoing), outgoing.size) == (2, 2, 70)
    outgoing.drop_oldest()
    assert (len(outgoing), outgoing.size) == (1, 40)


async def test_what_is_put_together_leaves_together_or_waits_together() -> None:
    pipe = Pipe()
    outgoing = SendQueue(pipe, size_of=lambda message: message)
    outgoing.put_messages(1, 2, 3)
    assert (len(pipe.wire), len(outgoing)) == (3, 0)
    outgoing.put_messages(4, 5)
    outgoing.put_messages(6)
    outgoing.put_messages()
    assert pipe.offered == [(1, 2, 3), (4, 5)]
    assert (len(outgoing), outgoing.size) == (3, 15)
    pumping = asyncio.create_task(outgoing.run_sender())
    assert [await soon(pipe.receive()) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    pumping.cancel()


async def test_what_fills_several_frames_oversteps_the_bound_by_one_of_them() -> None:
    pipe, third = Pipe(), MAX_BUNDLE_BYTES // 3
    outgoing = SendQueue(pipe, size_of=lambda message: message)
    outgoing.put_messages(*[third] * 7)
    assert [len(messages) for messages in pipe.offered] == [3, 3]
    assert (len(pipe.wire), len(outgoing), outgoing.size) == (3, 4, 4 * third)
    outgoing = SendQueue(empty := Pipe(), size_of=lambda message: message)
    outgoing.put_messages(1, 10 * third, 1, 1)
    assert empty.offered == [(1,), (10 * third,), (1, 1)]


async def test_the_order_is_kept_whatever_finds_room() -> None:
    pipe = Pipe()
    outgoing = SendQueue(pipe)
    pumping = asyncio.create_task(outgoing.run_sender())
    received: list[int] = []
    for number in range(0, 60, 3):
        for message in range(number, number + 3):
            outgoing.put_messages(message)
        # One more is taken than fits: the pump is in the middle of a `send` at the next put.
        received += [await pipe.receive(), await pipe.receive()]
    while len(received) < 60:
        received.append(await soon(pipe.receive()))
    assert received == list(range(60))
    assert len(outgoing) == 0
    pumping.cancel()


async def test_a_lost_connection_is_told_to_both_ways_of_sending() -> None:
    pipe = Pipe()
    outgoing = SendQueue(pipe)
    for message in range(4):
        outgoing.put_messages(message)
    pumping = asyncio.create_task(outgoing.run_sender())
    await asyncio.sleep(0)
    await pipe.close()
    with pytest.raises(ConnectionLostError):
        await soon(pumping)
    with pytest.raises(ConnectionLostError):
        SendQueue(pipe).put_messages(5)
