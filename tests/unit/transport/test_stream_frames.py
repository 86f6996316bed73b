from __future__ import annotations

import asyncio

import pytest

from outrider.errors import ConnectionLostError
from outrider.transport.grpc.eager_coroutine import EagerCoroutine
from outrider.transport.grpc.streams import StreamFrames
from tests.waiting import soon


class Call:
    """A call whose reads and writes the test ends."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.started: list[bytes] = []
        self.written: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.refuses = False
        self.may_write = asyncio.Event()

    def frames(self) -> StreamFrames:
        return StreamFrames("peer", self.incoming.get, self._write)

    async def _write(self, frame: bytes) -> None:
        if self.refuses:
            raise ConnectionLostError("lost peer", reason="PEER_LOST")
        self.started.append(frame)
        try:
            await self.may_write.wait()
        except asyncio.CancelledError:
            self.cancelled.append(frame)
            raise
        self.written.append(frame)


async def until_parked() -> None:
    """Let both pumps come to their first wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_offered_frame_reaches_an_idle_call_before_anything_else_runs() -> None:
    call = Call()
    frames = call.frames()
    await until_parked()
    assert frames.try_send(b"1")
    assert call.started == [b"1"]
    call.may_write.set()
    await until_parked()
    assert call.written == [b"1"]
    assert frames.try_send(b"2")
    assert call.started == [b"1", b"2"]
    await frames.close()
    assert call.written == [b"1", b"2"]


async def test_frames_offered_together_are_written_in_order_the_first_at_once() -> None:
    call = Call()
    frames = call.frames()
    await until_parked()
    assert frames.try_send(b"1", b"2", b"3")
    assert call.started == [b"1"]
    assert frames.try_send(b"4", b"5")
    assert frames.try_send()
    call.may_write.set()
    await frames.close()
    assert call.written == [b"1", b"2", b"3", b"4", b"5"]


async def test_frames_that_have_arrived_are_ready() -> None:
    call = Call()
    frames = call.frames()
    assert frames.receive_ready() == []
    for frame in (b"1", b"2", b"3"):
        call.incoming.put_nowait(frame)
    assert await soon(frames.receive()) == b"1"
    await until_parked()
    assert frames.receive_ready() == [b"2", b"3"]
    call.incoming.put_nowait(b"4")
    call.incoming.put_nowait(None)
    await until_parked()
    assert frames.receive_ready() == [b"4"]
    assert frames.receive_ready() == []
    with pytest.raises(ConnectionLostError):
        await frames.receive()
    await frames.close()


async def test_one_write_at_a_time_in_order() -> None:
    call = Call()
    frames = call.frames()
    await until_parked()
    for frame in (b"1", b"2"):
        assert frames.try_send(frame)
    await frames.send(b"3")
    await until_parked()
    assert call.started == [b"1"]
    call.may_write.set()
    await frames.close()
    assert call.written == [b"1", b"2", b"3"]


async def test_a_frame_offered_while_a_write_ends_does_not_overtake() -> None:
    call = Call()
    call.may_write.set()
    frames = call.frames()
    await until_parked()
    sent = [bytes([number]) for number in range(50)]
    for frame in sent:
        assert frames.try_send(frame)
        await asyncio.sleep(0)
    await frames.close()
    assert call.written == sent


async def test_a_write_that_fails_at_once_ends_the_stream() -> None:
    call = Call()
    frames = call.frames()
    await until_parked()
    call.refuses = True
    assert frames.try_send(b"1")
    with pytest.raises(ConnectionLostError):
        await soon(frames.receive())
    with pytest.raises(ConnectionLostError):
        frames.try_send(b"2")
    await frames.close()


async def test_a_write_that_hangs_is_cancelled_by_close() -> None:
    call = Call()
    frames = call.frames()
    await until_parked()
    frames.try_send(b"1")
    await frames.close()
    assert call.started == [b"1"] and call.cancelled == [b"1"]


async def test_a_closed_stream_writes_nothing() -> None:
    call = Call()
    frames = call.frames()
    await until_parked()
    frames.abort(ConnectionLostError("lost peer", reason="PEER_LOST"))
    with pytest.raises(ConnectionLostError):
        frames.try_send(b"1")
    assert call.started == []
    await frames.close()


async def test_what_a_begun_coroutine_raises_is_raised_by_the_await() -> None:
    async def fails(steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        raise ConnectionLostError("lost", reason="PEER_LOST")

    for steps in range(3):
        begun = EagerCoroutine(fails(steps))
        with pytest.raises(ConnectionLostError, match="lost"):
            await begun


async def test_a_begun_coroutine_may_outlive_a_cancellation() -> None:
    steps: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            steps.append("cancelled")
        await asyncio.sleep(0)
        steps.append("done")

    async def wait_for(begun: EagerCoroutine) -> None:
        await begun

    task = asyncio.create_task(wait_for(EagerCoroutine(stubborn())))
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert steps == ["cancelled", "done"]
