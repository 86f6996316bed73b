from __future__ import annotations

import asyncio
import time

import pytest

from outrider.errors import ConnectionLostError, InvalidMessageError
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.heartbeat import (
    HeartbeatConfig,
    HeartbeatConnection,
    cancel_if_silent,
    with_heartbeat,
)
from outrider.wire.messages import Heartbeat
from tests.waiting import soon, until

FAST = HeartbeatConfig(interval_s=0.05, timeout_s=0.2)


class Pipe:
    """A connection of ints whose other end is the test."""

    peer = "pipe"

    def __init__(self) -> None:
        self.incoming: BoundedQueue[int | Heartbeat | Exception] = BoundedQueue()
        self.outgoing: BoundedQueue[int | Heartbeat] = BoundedQueue()

    async def send(self, message: int | Heartbeat) -> None:
        await self.outgoing.put(message)

    def try_send(self, *messages: int | Heartbeat) -> bool:
        return self.outgoing.try_put(*messages)

    async def receive(self) -> int | Heartbeat:
        message = await self.incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    def receive_ready(self) -> list[int | Heartbeat]:
        found = self.incoming.take_all()
        return [message for message in found if not isinstance(message, Exception)]

    async def close(self) -> None:
        closed = ConnectionLostError("closed", reason="CLOSED")
        self.incoming.close(closed)
        self.outgoing.close(closed)


def connected() -> tuple[Pipe, HeartbeatConnection[int, int]]:
    pipe = Pipe()
    return pipe, with_heartbeat(pipe, FAST)


async def test_heartbeats_are_sent_and_count_up() -> None:
    pipe, connection = connected()
    beats = [await soon(pipe.outgoing.get()) for _ in range(3)]
    assert beats == [Heartbeat(1), Heartbeat(2), Heartbeat(3)]
    await connection.close()


async def test_received_heartbeats_are_hidden() -> None:
    pipe, connection = connected()
    await pipe.incoming.put(Heartbeat(1))
    await pipe.incoming.put(7)
    assert await soon(connection.receive()) == 7
    await connection.close()


async def test_heartbeats_are_hidden_among_what_is_ready() -> None:
    pipe, connection = connected()
    pipe.incoming.try_put(Heartbeat(1), 7, Heartbeat(2), 8, Heartbeat(3))
    assert await soon(connection.receive()) == 7
    assert connection.receive_ready() == [8]
    assert connection.receive_ready() == []
    assert connection.try_send(1, 2)
    assert pipe.outgoing.take_all() == [1, 2]
    await connection.close()


async def test_a_silent_peer_is_lost_after_the_timeout() -> None:
    _pipe, connection = connected()
    started = time.monotonic()
    with pytest.raises(ConnectionLostError, match=r"nothing heard from pipe for 0\.2 s"):
        await soon(connection.receive())
    assert time.monotonic() - started >= 0.15
    with pytest.raises(ConnectionLostError, match="nothing heard"):
        await connection.send(1)


async def test_heartbeats_alone_keep_a_connection() -> None:
    pipe, connection = connected()
    receiving = asyncio.create_task(connection.receive())
    for sequence in range(10):
        await pipe.incoming.put(Heartbeat(sequence))
        await asyncio.sleep(0.05)
    assert not receiving.done()
    await pipe.incoming.put(7)
    assert await soon(receiving) == 7
    await connection.close()


async def test_malformed_messages_show_that_the_peer_is_alive() -> None:
    pipe, connection = connected()
    for _ in range(8):
        await pipe.incoming.put(InvalidMessageError("malformed"))
        with pytest.raises(InvalidMessageError):
            await connection.receive()
        await asyncio.sleep(0.05)
    await pipe.incoming.put(7)
    assert await connection.receive() == 7
    await connection.close()


async def test_a_peer_is_not_silent_while_nobody_listens() -> None:
    pipe, connection = connected()
    await asyncio.sleep(0.4)
    await pipe.incoming.put(7)
    assert await connection.receive() == 7
    await connection.close()


async def test_a_stalled_local_loop_does_not_make_the_peer_silent() -> None:
    pipe, connection = connected()
    receiving = asyncio.create_task(connection.receive())
    await asyncio.sleep(0.01)
    time.sleep(0.5)  # the stall; the peer's message arrives just after it
    await asyncio.sleep(0.01)
    await pipe.incoming.put(7)
    assert await soon(receiving) == 7
    await connection.close()


async def test_a_closed_connection_leaves_no_task() -> None:
    before = len(asyncio.all_tasks())
    _pipe, connection = connected()
    await connection.close()
    await until(lambda: len(asyncio.all_tasks()) == before)


async def test_unless_silent_gives_the_result_or_up() -> None:
    async def after(delay_s: float) -> int:
        await asyncio.sleep(delay_s)
        return 5

    assert await cancel_if_silent(asyncio.create_task(after(0.05)), "peer", FAST) == 5
    hanging = asyncio.create_task(after(60))
    with pytest.raises(ConnectionLostError, match="nothing heard from peer"):
        await cancel_if_silent(hanging, "peer", FAST)
    await asyncio.wait((hanging,))
    assert hanging.cancelled()


@pytest.mark.parametrize(("interval_s", "timeout_s"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)])
def test_a_timeout_shorter_than_the_interval_is_refused(
    interval_s: float, timeout_s: float
) -> None:
    with pytest.raises(ValueError, match="interval_s"):
        HeartbeatConfig(interval_s=interval_s, timeout_s=timeout_s)
