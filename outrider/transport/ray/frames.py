"""Frames as arguments and results of Ray actor calls: packing, ordering, receiving."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.errors import ConnectionLostError, InvalidMessageError, OutriderError
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.error_codec import ErrorStatus

ItemT = TypeVar("ItemT")

Frame = bytes | memoryview
MAX_BATCH = 64
"""Maximum number of frames in one call."""
MAX_BATCH_BYTES = 4 << 20
"""Maximum total size in bytes of the frames in one call. A larger frame has a call of its own."""
_MAX_AHEAD = 64
"""Maximum number of calls that may arrive before an earlier one. If more arrive, the earlier call
is taken as lost."""


@dataclass(frozen=True, slots=True)
class ObjectRefFrame:
    """A frame in Ray's object store. The ref is nested in this object so that Ray passes it on
    unresolved."""

    ref: Any


PackedFrame = bytes | ObjectRefFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameBatch:
    """The frames of one call, in order. `sequence` numbers the calls of each direction from 0."""

    sequence: int
    frames: tuple[PackedFrame, ...] = ()
    error: ErrorStatus | None = None
    """Error with which the stream ended, after these frames; None except in the last batch."""


def pack_frames(frames: Sequence[Frame], bulk_bytes: int) -> tuple[PackedFrame, ...]:
    """Return the frames as arguments of a Ray call. Frames larger than `bulk_bytes` are put into
    Ray's object store."""
    import ray

    return tuple(
        ObjectRefFrame(ray.put(np.frombuffer(frame, dtype=np.uint8)))
        if len(frame) > bulk_bytes
        else bytes(frame)
        for frame in frames
    )


async def unpack_frame(frame: object, timeout_s: float) -> Frame:
    """Return a frame's bytes. Raises ConnectionLostError if the object store does not return them
    within `timeout_s`, and InvalidMessageError for anything but a frame."""
    if isinstance(frame, bytes):
        return frame
    if not isinstance(frame, ObjectRefFrame):
        raise InvalidMessageError(f"a frame must be bytes, got {type(frame).__name__}")
    from ray.exceptions import RayError

    try:
        array = await asyncio.wait_for(frame.ref, timeout_s)
    except (RayError, TimeoutError) as error:
        raise ConnectionLostError("a bulk frame is lost", reason="OBJECT_LOST") from error
    return memoryview(array)


class Resequencer(Generic[ItemT]):
    """Restores the order of numbered items and drops duplicates."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, ItemT] = {}

    def accept_item(self, sequence: int, item: ItemT) -> list[ItemT]:
        """Add an item and return the items that can now be delivered in order. Raises
        ConnectionLostError if an item is missing although many later ones have arrived."""
        if sequence >= self._next:
            self._early[sequence] = item
        if len(self._early) > _MAX_AHEAD:
            raise ConnectionLostError(f"call {self._next} is lost", reason="CALL_LOST")
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


class BatchReceiver:
    """Receives batches of frames from concurrent calls, restores the order of the batches, and puts
    the frames into a bounded queue."""

    def __init__(self, mailbox: BoundedQueue[Frame], timeout_s: float) -> None:
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._order: Resequencer[FrameBatch] = Resequencer()
        self._lock = asyncio.Lock()

    async def accept_batch(self, batch: FrameBatch) -> ErrorStatus | None:
        """Accept a batch, and put the frames of all batches that are now in order into the queue.
        Returns the error of the last batch of the stream if that batch is among them, else None.

        Waits while the bounded queue is full. Raises the queue's error once the queue is closed.
        """
        async with self._lock:
            for ready in self._order.accept_item(batch.sequence, batch):
                for frame in ready.frames:
                    await self._mailbox.put(await unpack_frame(frame, self._timeout_s))
                if ready.error is not None:
                    return ready.error
        return None


def closed_error(peer: str) -> OutriderError:
    """Return the error for the side that closed its own connection to `peer`."""
    return ConnectionLostError(f"connection to {peer} is closed", reason="CLOSED")


def frame_mailbox() -> BoundedQueue[Frame]:
    """Return a bounded queue of frames."""
    return BoundedQueue(max_items=4 * MAX_BATCH, size_of=len)
