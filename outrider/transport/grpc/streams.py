"""gRPC call as a bounded `FrameStream`, whose sends and receives can be cancelled safely.

grpc.aio cancels the whole call when a read or write of the call is cancelled, and it allows only
one write at a time. Two pump tasks and two bounded queues hide both limits from the users of a
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from outrider.errors import ConnectionLostError, OutriderError
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.grpc.eager_coroutine import EagerCoroutine

FLUSH_TIMEOUT_S = 0.5
"""Time that `close` waits for the peer to read queued frames, in seconds."""
INBOX_FRAMES = 64
"""Maximum number of received frames that the receiver has not taken yet. At this number, reading
from the call stops."""


class StreamFrames:
    """A stream of frames over two coroutine functions, `read` and `write`.

    `read` returns the next frame, or None at the end of the stream; `write` sends a frame. Both
    raise typed errors. At the client, `half_close` tells the server that no more frames follow, and
    `cancel` ends the call. The server has neither, because a call ends at the server when its
    handler returns.
    """

    def __init__(
        self,
        peer: str,
        read: Callable[[], Awaitable[bytes | None]],
        write: Callable[[bytes], Coroutine[Any, Any, None]],
        *,
        half_close: Callable[[], Awaitable[None]] | None = None,
        cancel: Callable[[], object] | None = None,
    ) -> None:
        self._peer = peer
        self._read, self._write = read, write
        self._half_close, self._cancel = half_close, cancel
        self._inbox: BoundedQueue[bytes] = BoundedQueue(max_items=INBOX_FRAMES, size_of=len)
        self._outbox: BoundedQueue[bytes | EagerCoroutine] = BoundedQueue(size_of=_size)
        self._resting = False
        """Whether no write is in progress and no frame is queued."""
        self._closing = False
        self._reader = asyncio.create_task(self._pump_in(), name="outrider-exchange-read")
        self._writer = asyncio.create_task(self._pump_out(), name="outrider-exchange-write")

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self._peer

    async def send(self, frame: bytes) -> None:
        """Wait until the queue has space, then queue a frame."""
        if not self.try_send(frame):
            await self._outbox.put(frame)

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True. If the queue is full, queue none and return False."""
        if not frames or not self._resting or self._outbox.is_closed:
            return self._outbox.try_put(*frames)
        # The call has the frame before any other task or thread runs; the writer awaits the end.
        self._resting = False
        return self._outbox.try_put(EagerCoroutine(self._write(frames[0])), *frames[1:])

    async def receive(self) -> bytes:
        """Return the next frame. Raises the error that ended the stream."""
        return await self._inbox.get()

    def receive_ready(self) -> list[bytes]:
        """Return the frames that have arrived, without waiting."""
        return self._inbox.take_all()

    async def close(self) -> None:
        """Send the queued frames for at most `FLUSH_TIMEOUT_S`, then end the call."""
        if self._closing:
            return
        self._closing = True
        closed = ConnectionLostError(f"connection to {self.peer} is closed", reason="CLOSED")
        self._inbox.close(closed, discard=True)
        self._outbox.close(closed)
        await asyncio.wait((self._writer,), timeout=FLUSH_TIMEOUT_S)
        if self._half_close is not None and self._writer.done():
            # A cancelled call drops what its peer has not read yet: let the peer end it.
            with contextlib.suppress(Exception):
                await self._half_close()
                await asyncio.wait((self._reader,), timeout=FLUSH_TIMEOUT_S)
        if self._cancel is not None:
            self._cancel()
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.wait((self._reader, self._writer))

    def abort(self, error: OutriderError) -> None:
        """End both directions immediately, e.g. because the RPC was cancelled."""
        self._inbox.close(error)
        self._outbox.close(to_lost_error(error), discard=True)

    async def _pump_in(self) -> None:
        try:
            while (frame := await self._read()) is not None:
                # After a local close, frames are read and dropped until the peer ends too.
                if not self._inbox.is_closed:
                    with contextlib.suppress(OutriderError):
                        await self._inbox.put(frame)
            error: OutriderError = ConnectionLostError(
                f"{self.peer} ended the exchange", reason="PEER_CLOSED"
            )
        except OutriderError as failure:
            error = failure
        self.abort(error)

    async def _pump_out(self) -> None:
        with contextlib.suppress(OutriderError):
            while True:
                self._resting = not len(self._outbox)
                frame = await self._outbox.get()
                self._resting = False
                await (frame if isinstance(frame, EagerCoroutine) else self._write(frame))
        # The reader learns why the stream broke; this bound is for a peer that says nothing.
        if not self._closing:
            await asyncio.wait((self._reader,), timeout=FLUSH_TIMEOUT_S)
            self.abort(ConnectionLostError(f"lost {self.peer}", reason="PEER_LOST"))


def _size(frame: bytes | EagerCoroutine) -> int:
    return 0 if isinstance(frame, EagerCoroutine) else len(frame)


def to_lost_error(error: OutriderError) -> ConnectionLostError:
    """Return the ConnectionLostError that senders raise after `error` has ended the stream."""
    if isinstance(error, ConnectionLostError):
        return error
    return ConnectionLostError(error.message, reason=error.reason)
