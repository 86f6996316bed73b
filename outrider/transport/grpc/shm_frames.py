"""Stream whose frames use a shared-memory channel instead of the gRPC call (same host).

The gRPC call stays open: its metadata set up the shared-memory channel, and it ends with its peer.
No frame passes through it or through the threads and tasks of grpc.aio, which cost several times as
much as a packet.
"""

from __future__ import annotations

import asyncio
import contextlib

from outrider.errors import ConnectionLostError, OutriderError
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.grpc.streams import (
    FLUSH_TIMEOUT_S,
    INBOX_FRAMES,
    StreamFrames,
    to_lost_error,
)
from outrider.transport.shm import RING_POLL_S, ShmChannel
from outrider.wire.limits import MAX_BUNDLE_BYTES

_LAST_LOOKS = 128
"""At the end of a stream: a peer that is there still may send for ever."""


class ShmFrames:
    """Frames over a shared-memory channel, for one event loop, until the shared-memory channel or
    its call ends."""

    def __init__(self, call: StreamFrames, shm_channel: ShmChannel) -> None:
        """`call`: the stream that the shared-memory channel belongs to; either takes the other one
        along."""
        self._call, self._shm_channel = call, shm_channel
        self._loop = asyncio.get_running_loop()
        self._inbox: BoundedQueue[bytes] = BoundedQueue(max_items=INBOX_FRAMES, size_of=len)
        self._error: OutriderError | None = None
        """Why nothing is sent, or received from the shared-memory channel, any more."""
        self._room = asyncio.Event()
        """Whether nothing is left to send."""
        self._room.set()
        self._reads = False
        self._read_on()
        self._watch = asyncio.create_task(self._until_the_call_ends(), name="outrider-shm-watch")

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self._call.peer

    @property
    def num_unread(self) -> int:
        """Frames that have arrived and were not taken."""
        return len(self._inbox)

    @property
    def unread_bytes(self) -> int:
        """Size of these."""
        return self._inbox.size

    async def send(self, frame: bytes) -> None:
        """Queue a frame, and wait while the queue is full."""
        while not self.try_send(frame):
            await self._room.wait()

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True, or none and return False if the queue is full."""
        if self._error is not None:
            raise to_lost_error(self._error)
        if self._shm_channel.unsent_bytes > MAX_BUNDLE_BYTES:
            return False
        try:
            self._shm_channel.send(*frames)
        except OutriderError as error:
            self._lose(lost := to_lost_error(error))
            raise lost from None
        if self._shm_channel.num_unsent and self._room.is_set():
            self._room.clear()
            self._send_on_later()
        return True

    async def receive(self) -> bytes:
        """Return the next frame. Raises the error that ended the stream."""
        frame = await self._inbox.get()
        self._read_on()
        return frame

    def receive_ready(self) -> list[bytes]:
        """Return the frames that have arrived."""
        frames = self._inbox.take_all()
        self._read_on()
        return frames

    async def close(self) -> None:
        """Send what is left within a bounded time, then end the shared-memory channel and the
        call."""
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
        reads = self._error is None and not self._inbox.is_full
        if reads == self._reads:
            return
        self._reads = reads
        if reads:
            self._loop.add_reader(self._shm_channel.fileno(), self._take_in)
        else:
            self._loop.remove_reader(self._shm_channel.fileno())

    def _take_in(self) -> None:
        try:
            self._inbox.put_unbounded(*self._shm_channel.receive())
        except ConnectionLostError as error:
            self._lose(error)
        self._read_on()

    def _send_on_later(self) -> None:
        """Once there may be room: nobody says so of a ring."""
        if self._shm_channel.ring_full:
            self._loop.call_later(RING_POLL_S, self._send_on)
        else:
            self._loop.add_writer(self._shm_channel.fileno(), self._send_on)

    def _send_on(self) -> None:
        """There may be room again."""
        if self._error is not None:
            return
        self._loop.remove_writer(self._shm_channel.fileno())
        try:
            self._shm_channel.flush()
        except ConnectionLostError as error:
            self._lose(error)
            return
        if self._shm_channel.num_unsent:
            self._send_on_later()
        else:
            self._room.set()

    def _lose(self, error: ConnectionLostError) -> None:
        """The shared-memory channel is gone, and most likely the peer: the call says why, if it
        says so soon."""
        if self._error is not None:
            return
        self._take_the_last()
        self._release_frames(error)
        self._loop.call_later(FLUSH_TIMEOUT_S, self.abort, error)

    def _take_the_last(self) -> None:
        """What the peer had said before its end counts."""
        with contextlib.suppress(ConnectionLostError):
            for _ in range(_LAST_LOOKS):
                frames = self._shm_channel.receive()
                if not frames:
                    return
                self._inbox.put_unbounded(*frames)

    async def _until_the_call_ends(self) -> None:
        try:
            while True:
                await self._call.receive()
        except OutriderError as error:
            if self._error is None:
                self._take_the_last()
            self._end(error)

    def _end(self, error: OutriderError) -> None:
        """Let go of the shared-memory channel, if it is held yet, and tell whoever reads why."""
        self._release_frames(error)
        self._inbox.close(error)

    def _release_frames(self, error: OutriderError) -> None:
        if self._error is not None:
            return
        self._error, self._reads = error, False
        self._loop.remove_reader(self._shm_channel.fileno())
        self._loop.remove_writer(self._shm_channel.fileno())
        self._shm_channel.close()
        self._room.set()
