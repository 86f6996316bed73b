"""A stream whose frames go by a lane: of two processes of one host that share it.

The call stays: it was dialled, it ends with its peer, and its metadata brought both ends to the
lane. But no frame passes through it, nor through the threads and tasks of grpc.aio, which cost
several times what a packet does.
"""

from __future__ import annotations

import asyncio
import contextlib

from outrider.errors import ConnectionLostError, OutriderError
from outrider.transport.bounded_queue import Mailbox
from outrider.transport.grpc.streams import FLUSH_TIMEOUT_S, INBOX_FRAMES, StreamFrames, as_lost
from outrider.transport.shm import RING_LOOK_S, Lane
from outrider.wire.limits import MAX_BUNDLE_BYTES

_LAST_LOOKS = 128
"""At the end of a stream: a peer that is there still may send for ever."""


class LanedFrames:
    """Frames over a lane, for one event loop, until the lane or its call ends."""

    def __init__(self, call: StreamFrames, lane: Lane) -> None:
        """`call`: the stream that the lane belongs to; either takes the other one along."""
        self._call, self._lane = call, lane
        self._loop = asyncio.get_running_loop()
        self._inbox: Mailbox[bytes] = Mailbox(max_items=INBOX_FRAMES, size_of=len)
        self._error: OutriderError | None = None
        """Why nothing is sent, or received from the lane, any more."""
        self._room = asyncio.Event()
        """Whether nothing is left to send."""
        self._room.set()
        self._reads = False
        self._read_on()
        self._watch = asyncio.create_task(self._until_the_call_ends(), name="outrider-lane-watch")

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self._call.peer

    async def send(self, frame: bytes) -> None:
        """Queue a frame; waits while the peer is not reading."""
        while not self.offer(frame):
            await self._room.wait()

    def offer(self, *frames: bytes) -> bool:
        """Queue frames if there is room now."""
        if self._error is not None:
            raise as_lost(self._error)
        if self._lane.unsent_bytes > MAX_BUNDLE_BYTES:
            return False
        try:
            self._lane.send(*frames)
        except OutriderError as error:
            self._lose(lost := as_lost(error))
            raise lost from None
        if self._lane.unsent and self._room.is_set():
            self._room.clear()
            self._send_on_later()
        return True

    async def receive(self) -> bytes:
        """The next frame; raises the error that ended the stream."""
        frame = await self._inbox.get()
        self._read_on()
        return frame

    def ready(self) -> list[bytes]:
        """The frames that have arrived."""
        frames = self._inbox.take_all()
        self._read_on()
        return frames

    async def close(self) -> None:
        """Send what is left within a bounded time, then end the lane and the call."""
        closed = ConnectionLostError(f"connection to {self.peer} is closed", reason="CLOSED")
        self._inbox.close(closed, discard=True)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await self._room.wait()
        finally:
            self._end(closed)
            self._watch.cancel()
        await self._call.close()

    def abort(self, error: OutriderError) -> None:
        """End both directions at once, e.g. because the RPC was cancelled."""
        self._end(error)
        self._call.abort(error)

    def _read_on(self) -> None:
        """Take what arrives, unless much of it waits to be taken already."""
        reads = self._error is None and not self._inbox.full
        if reads == self._reads:
            return
        self._reads = reads
        if reads:
            self._loop.add_reader(self._lane.fileno(), self._take_in)
        else:
            self._loop.remove_reader(self._lane.fileno())

    def _take_in(self) -> None:
        try:
            self._inbox.add(*self._lane.receive())
        except ConnectionLostError as error:
            self._lose(error)
        self._read_on()

    def _send_on_later(self) -> None:
        """Once there may be room: nobody says so of a ring."""
        if self._lane.ring_full:
            self._loop.call_later(RING_LOOK_S, self._send_on)
        else:
            self._loop.add_writer(self._lane.fileno(), self._send_on)

    def _send_on(self) -> None:
        """There may be room again."""
        if self._error is not None:
            return
        self._loop.remove_writer(self._lane.fileno())
        try:
            self._lane.flush()
        except ConnectionLostError as error:
            self._lose(error)
            return
        if self._lane.unsent:
            self._send_on_later()
        else:
            self._room.set()

    def _lose(self, error: ConnectionLostError) -> None:
        """The lane is gone, and most likely the peer: the call says why, if it says so soon."""
        if self._error is not None:
            return
        self._take_the_last()
        self._let_go(error)
        self._loop.call_later(FLUSH_TIMEOUT_S, self.abort, error)

    def _take_the_last(self) -> None:
        """What the peer had said before its end counts."""
        with contextlib.suppress(ConnectionLostError):
            for _ in range(_LAST_LOOKS):
                frames = self._lane.receive()
                if not frames:
                    return
                self._inbox.add(*frames)

    async def _until_the_call_ends(self) -> None:
        try:
            while True:
                await self._call.receive()
        except OutriderError as error:
            if self._error is None:
                self._take_the_last()
            self._end(error)

    def _end(self, error: OutriderError) -> None:
        """Let go of the lane, if it is held yet, and tell whoever reads why."""
        self._let_go(error)
        self._inbox.close(error)

    def _let_go(self, error: OutriderError) -> None:
        if self._error is not None:
            return
        self._error, self._reads = error, False
        self._loop.remove_reader(self._lane.fileno())
        self._loop.remove_writer(self._lane.fileno())
        self._lane.close()
        self._room.set()
