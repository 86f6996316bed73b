"""Client side of an exchange stream that is carried by Ray actor calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from outrider.errors import ConnectionLostError, OutriderError
from outrider.transport.error_codec import from_status
from outrider.transport.ray.calls import HostCalls
from outrider.transport.ray.frames import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    BatchReceiver,
    Frame,
    FrameBatch,
    closed_error,
    frame_mailbox,
    pack_frames,
)

_PULLS = 2
"""Number of simultaneous pull calls: one waits at the host while the answer of the other is
transferred."""
_PUSHES = 4
"""Maximum number of simultaneous push calls."""
_FLUSH_TIMEOUT_S = 1.0


class ActorFrames:
    """Client side of a stream over Ray actor calls. It pushes the frames that it sends to the
    actor, and pulls the frames that it receives from the actor."""

    def __init__(self, host: HostCalls, key: int) -> None:
        self._host, self._key = host, key
        self._inbox = frame_mailbox()
        self._outbox = frame_mailbox()
        self._inlet = BatchReceiver(self._inbox, host.config.control_timeout_s)
        self._pushes: set[asyncio.Task[None]] = set()
        self._writer = asyncio.create_task(self._push_all())
        self._readers = [asyncio.create_task(self._pull_all()) for _ in range(_PULLS)]
        self._closing = False

    @property
    def peer(self) -> str:
        """Name of the verifier's actor."""
        return self._host.address

    async def send(self, frame: bytes) -> None:
        """Wait until the queue has space, then queue a frame."""
        await self._outbox.put(frame)

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True. If the queue is full, queue none and return False."""
        return self._outbox.try_put(*frames)

    async def receive(self) -> Frame:
        """Return the next frame."""
        return await self._inbox.get()

    def receive_ready(self) -> list[Frame]:
        """Return the frames that have arrived, without waiting."""
        return self._inbox.take_all()

    async def close(self) -> None:
        """Send queued frames within a time limit, then close the stream at the actor."""
        if self._closing:
            return
        self._closing = True
        closed = closed_error(self.peer)
        self._inbox.close(closed, discard=True)
        self._outbox.close(closed)
        await asyncio.wait((self._writer, *self._pushes), timeout=_FLUSH_TIMEOUT_S)
        await asyncio.wait((*self._pushes, self._writer), timeout=_FLUSH_TIMEOUT_S)
        tasks = [self._writer, *self._readers, *self._pushes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        with contextlib.suppress(OutriderError):
            await self._host.poll("end_exchange", self._key)

    def _abort(self, error: OutriderError) -> None:
        self._inbox.close(error)
        self._outbox.close(
            ConnectionLostError(f"lost {self.peer}", reason="PEER_LOST"), discard=True
        )

    async def _push_all(self) -> None:
        with contextlib.suppress(OutriderError):
            for sequence in itertools.count():
                await self._outbox.wait(self._host.config.heartbeat.interval_s)
                frames: list[Frame] = list(self._outbox.take_some(MAX_BATCH, MAX_BATCH_BYTES))
                while len(self._pushes) >= _PUSHES:
                    await asyncio.wait(self._pushes, return_when=asyncio.FIRST_COMPLETED)
                packed = pack_frames(frames, self._host.config.bulk_bytes)
                batch = FrameBatch(sequence=sequence, frames=packed)
                task = asyncio.create_task(self._push(batch))
                self._pushes.add(task)
                task.add_done_callback(self._pushes.discard)

    async def _push(self, batch: FrameBatch) -> None:
        try:
            await self._host.stream("push_frames", self._key, batch)
        except OutriderError as error:
            # A pull tells why the exchange ended; this bound is for a host that says nothing.
            await asyncio.wait(self._readers, timeout=_FLUSH_TIMEOUT_S)
            self._abort(error)

    async def _pull_all(self) -> None:
        interval_s = self._host.config.heartbeat.interval_s
        try:
            while True:
                batch = await self._host.poll("pull_frames", self._key, interval_s)
                ended = await self._inlet.accept_batch(batch)
                if ended is not None:
                    raise from_status(ended)
        except OutriderError as error:
            self._abort(error)
