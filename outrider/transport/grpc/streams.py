"""gRPC exchange stream as bounded frames, with reads and writes that can be cancelled safely.

grpc.aio cancels the whole call when a read or write of it is cancelled, and allows one write at a
time; two pump tasks and two bounded queues hide both limits from the users of a connection.
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
"""Maximum number of received frames that wait for the receiver; with more, reading stops."""


class StreamFrames:
    """Frames over a pair of read and write coroutines.

    `read` returns the next frame, or None at the end of the stream; `write` sends a frame. Both
    raise typed errors. On the side that owns the call, `half_close` announces the end of its frames
    and `cancel` ends the call. The other side has neither: its call ends when its handler returns.
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
        """Queue a frame, and wait while the queue is full."""
        if not self.try_send(frame):
            await self._outbox.put(frame)

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True, or none and return False if the queue is full."""
        if not frames or not self._resting or self._outbox.is_closed:
            return self._outbox.try_put(*frames)
        # The call has the frame before any other task or thread runs; the writer awaits the end.
        self._resting = False
        return self._outbox.try_put(EagerCoroutine(self._write(frames[0])), *frames[1:])

    async def receive(self) -> bytes:
        """Return the next frame. Raises the error that ended the stream."""
        return await self._inbox.get()

    def receive_ready(self) -> list[bytes]:
        """Return the frames that have arrived."""
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
        """End both directions at once, e.g. because the RPC was cancelled."""
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
    """Return the error as ConnectionLostError, for the sender."""
    if isinstance(error, ConnectionLostError):
        return error
    return ConnectionLostError(error.message, reason=error.reason)
