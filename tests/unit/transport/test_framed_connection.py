"""Connections over frames: what is offered together crosses together, whatever is in it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import ConnectionLostError, InvalidMessageError
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.framed_connection import FramedConnection
from outrider.wire.bundles import join_messages, split_frame
from outrider.wire.codec import (
    decode_verifier_messages,
    encode_verifier_message,
    encode_verifier_messages,
)
from outrider.wire.messages import Heartbeat, VerifierMessage
from tests.integration.fake_endpoints import echo, proposal


class Loop:
    """Frames that come back to whoever sent them."""

    peer = "loop"

    def __init__(self) -> None:
        self.wire: BoundedQueue[bytes] = BoundedQueue(max_items=4)

    async def send(self, frame: bytes) -> None:
        await self.wire.put(frame)

    def try_send(self, *frames: bytes) -> bool:
        return self.wire.try_put(*frames)

    async def receive(self) -> bytes:
        return await self.wire.get()

    def receive_ready(self) -> list[bytes]:
        return self.wire.take_all()

    async def close(self) -> None:
        self.wire.close(ConnectionLostError("closed", reason="CLOSED"), discard=True)


def looped() -> tuple[Loop, FramedConnection[VerifierMessage, VerifierMessage]]:
    loop = Loop()
    return loop, FramedConnection(loop, encode_verifier_messages, decode_verifier_messages)


def beats(*numbers: int) -> list[Heartbeat]:
    return [Heartbeat(number) for number in numbers]


def with_garbage(*messages: VerifierMessage | None) -> bytes:
    """One frame; None is a malformed message."""
    (frame,) = join_messages(
        [b"\xff\xff" if m is None else encode_verifier_message(m) for m in messages]
    )
    return frame


async def test_what_is_offered_together_is_one_frame_in_order() -> None:
    loop, connection = looped()
    assert connection.try_send(*beats(1, 2, 3))
    assert len(loop.wire) == 1
    assert await connection.receive() == Heartbeat(1)
    assert connection.receive_ready() == beats(2, 3)
    assert connection.receive_ready() == []


async def test_ready_gives_what_has_arrived_in_all_frames() -> None:
    _loop, connection = looped()
    assert connection.try_send(*beats(1, 2))
    await connection.send(Heartbeat(3))
    assert connection.try_send(*beats(4, 5))
    assert await connection.receive() == Heartbeat(1)
    assert connection.receive_ready() == beats(2, 3, 4, 5)


async def test_what_is_too_large_for_a_frame_takes_several_of_them() -> None:
    loop, connection = looped()
    verdicts = [echo(proposal(number), rows=1024) for number in range(10)]
    assert connection.try_send(*verdicts)
    frames = loop.wire.take_all()
    assert [len(split_frame(frame)) for frame in frames] == [3, 3, 3, 1]
    assert loop.try_send(*frames)
    received: list[Any] = [await connection.receive(), *connection.receive_ready()]
    assert [int(verdicts.digests[0]) for verdicts in received] == list(range(10))


async def test_a_full_connection_takes_all_or_none() -> None:
    loop, connection = looped()
    for number in range(4):
        assert connection.try_send(Heartbeat(number))
    assert not connection.try_send(*beats(4, 5))
    assert len(loop.wire) == 4


async def test_a_malformed_message_is_raised_in_its_place_and_costs_itself() -> None:
    loop, connection = looped()
    loop.try_send(with_garbage(Heartbeat(1), Heartbeat(2), None, None, Heartbeat(3)))
    loop.try_send(b"\xff\xff", encode_verifier_message(Heartbeat(4)))
    assert await connection.receive() == Heartbeat(1)
    assert connection.receive_ready() == beats(2)
    for _ in range(2):
        with pytest.raises(InvalidMessageError):
            await connection.receive()
        assert connection.receive_ready() in ([], beats(3))
    with pytest.raises(InvalidMessageError):
        await connection.receive()
    assert await connection.receive() == Heartbeat(4)


async def test_a_cancelled_receive_loses_nothing_of_a_bundle() -> None:
    _loop, connection = looped()
    receiving = asyncio.create_task(connection.receive())
    await asyncio.sleep(0)
    assert connection.try_send(*beats(1, 2, 3))
    receiving.cancel()
    await asyncio.wait((receiving,))
    assert receiving.cancelled()
    assert await connection.receive() == Heartbeat(1)
    assert connection.receive_ready() == beats(2, 3)


async def test_what_arrived_before_a_loss_is_read_before_it_is_raised() -> None:
    loop, connection = looped()
    assert connection.try_send(*beats(1, 2, 3))
    loop.wire.close(ConnectionLostError("lost", reason="PEER_LOST"))
    assert await connection.receive() == Heartbeat(1)
    assert connection.receive_ready() == beats(2, 3)
    assert connection.receive_ready() == []
    with pytest.raises(ConnectionLostError):
        await connection.receive()


async def test_a_closed_connection_gives_nothing_that_was_unread() -> None:
    _loop, connection = looped()
    assert connection.try_send(*beats(1, 2, 3))
    assert await connection.receive() == Heartbeat(1)
    await connection.close()
    assert connection.receive_ready() == []
    with pytest.raises(ConnectionLostError):
        await connection.receive()
