"""Stream whose frames use a shared-memory channel instead of its gRPC call (on one host).

The gRPC call stays open, because its metadata set up the shared-memory channel and its end reports
the end of the peer. Frames do not use the call, because the threads and tasks of grpc.aio cost
several times as much as a packet of the shared-memory channel.
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
"""Largest number of reads of the channel at the end of a stream. A peer that still runs could
otherwise send forever.
"""


class ShmFrames:
    """Sends and receives frames over a shared-memory channel, in one event loop, until the channel
    or its gRPC call ends.
    """

    def __init__(self, call: StreamFrames, shm_channel: ShmChannel) -> None:
        """Start to read from `shm_channel`. `call` is the gRPC stream to which the channel belongs;
        when one of them ends, the other is ended too.
        """
        self._call, self._shm_channel = call, shm_channel
        self._loop = asyncio.get_running_loop()
        self._inbox: BoundedQueue[bytes] = BoundedQueue(max_items=INBOX_FRAMES, size_of=len)
        self._error: OutriderError | None = None
        """Error that ended the shared-memory channel; None while the channel is in use."""
        self._room = asyncio.Event()
        """Set while the channel has no unsent frames."""
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
        """Number of frames that have arrived and have not been received by the caller."""
        return len(self._inbox)

    @property
    def unread_bytes(self) -> int:
        """Size of the unread frames in bytes."""
        return self._inbox.size

    async def send(self, frame: bytes) -> None:
        """Wait until the queue has space, then queue a frame. Raises ConnectionLostError."""
        while not self.try_send(frame):
            await self._room.wait()

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True. If the queue is full, queue none and return False.

        Raises ConnectionLostError if the stream has ended.
        """
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
        """Return all frames that have arrived, without waiting."""
        frames = self._inbox.take_all()
        self._read_on()
        return frames

    async def close(self) -> None:
        """Send the queued frames for at most `FLUSH_TIMEOUT_S`, then end the shared-memory channel
        and the call.
        """
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
        """End both directions immediately, e.g. because the RPC was cancelled."""
        self._end(error)
        self._call.abort(error)

    def _read_on(self) -> None:
        """Start to read from the channel, or stop if the inbox is full or the channel has ended."""
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
        """Schedule `_send_on`: by polling if the ring is full, because a ring does not report free
        space, otherwise when the socket is writable.
        """
        if self._shm_channel.ring_full:
            self._loop.call_later(RING_POLL_S, self._send_on)
        else:
            self._loop.add_writer(self._shm_channel.fileno(), self._send_on)

    def _send_on(self) -> None:
        """Send the unsent frames as far as the channel has space."""
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
        """Handle a lost shared-memory channel. The stream ends with the error of the call if
        the call ends within `FLUSH_TIMEOUT_S`, otherwise with `error`.
        """
        if self._error is not None:
            return
        self._take_the_last()
        self._release_frames(error)
        self._loop.call_later(FLUSH_TIMEOUT_S, self.abort, error)

    def _take_the_last(self) -> None:
        """Put the frames that the peer sent before its end into the inbox."""
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
        """Release the shared-memory channel; readers get the unread frames, then `error`."""
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
