"""Ring buffer in memory shared by two processes: one writes frames, the other reads them.

`ShmChannel` sends the positions of frames in packets; the ring itself only tracks which part may be
overwritten. The first word of the memory is written by the reader. It is the number of frames that
the reader has finished with.

A device can write a part of a frame in place: `RingBuffer.reserve_frame` reserves the memory
beforehand, and the frame is then sent without a copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError

RING_BYTES: Final = 16 << 20
"""Size of a ring in bytes. A ring holds several rounds of the largest batch, including features."""
FRAME_HEADER_BYTES: Final = 32 << 10
"""Number of bytes that are kept free before memory of `reserve_frame`, for the beginning of the
frame."""
MAX_RESERVED_BYTES: Final = RING_BYTES // 4 - FRAME_HEADER_BYTES
"""Maximum size in bytes of one reservation. With it, two rounds fit into the ring while a third one
is read."""
_HEADER: Final = 4096
_ALIGNMENT: Final = 64
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def is_ring_view(values: NDArray[np.generic]) -> bool:
    """Return whether an array is a view of a frame in a ring, whose space cannot be reused while
    the view exists."""
    base: object = values
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, np.ndarray)


@dataclass(slots=True, eq=False)
class _Frame:
    """A part of the writer's ring that must not be overwritten yet."""

    start: int
    number: int = 0
    """Number of this frame: the reader is done with it once it has finished this many frames. 0 if
    the frame was not sent."""
    place: weakref.ref[NDArray[np.uint8]] | None = None
    """Reserved place into which a device writes the frame's content; in use as long as the array
    exists. None without a reservation."""
    address: int = 0
    """Memory address of the place."""

    def is_over(self, done: int) -> bool:
        """Return whether the space is free once the reader has finished `done` frames."""
        return self.number <= done and (self.place is None or self.place() is None)


class RingBuffer:
    """One direction of a channel. The writer and the reader map the same memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the `size` bytes of a descriptor, which the caller still owns."""
        self._memory = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._memory)
        self._done = self._bytes[:8].cast("Q")
        self._size = size - _HEADER
        self._head = 0
        """Offset of the next frame if there is space."""
        self._written = 0
        """Number of frames written (by a writer) or taken out (by a reader)."""
        self._unread: deque[_Frame] = deque()
        """Frames of a writer whose space is in use, in order of allocation."""
        self._reserved: dict[int, _Frame] = {}
        """Frames with a reserved place, by the address of the place."""
        self._last: _Frame | None = None
        """Frame that was written last; None if it was undone."""
        self._memory_array: NDArray[np.uint8] | None = None
        """The pinned memory, into which reserved places point; None if it is not pinned."""
        self._closed = False
        self._lent: deque[int] = deque()
        """Numbers of the lent frames of a reader, in order, starting with the first one that is
        still lent."""
        self._back: set[int] = set()
        """Numbers in `_lent` of frames that were given back."""
        self._lent_bytes = 0
        self._lending = threading.RLock()
        """Lock of the lending state. A frame is given back by the thread that drops its last view,
        possibly by the garbage collector while this thread holds the lock, so the lock is
        reentrant."""
        self._telling = False

    @staticmethod
    def create_memory() -> int:
        """Create zeroed memory that cannot be resized (sealed) and return its descriptor."""
        descriptor = os.memfd_create("outrider-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _HEADER + RING_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def from_descriptor(cls, descriptor: int) -> RingBuffer:
        """Map the ring in a descriptor from a peer; the caller still owns the descriptor. Raises
        InvalidMessageError for memory that is not sealed or has another size."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise InvalidMessageError(
                "a shared-memory channel's memory is not sealed", reason="SHM_MEMORY"
            )
        size = os.fstat(descriptor).st_size
        if size != _HEADER + RING_BYTES:
            raise InvalidMessageError(
                f"a shared-memory channel's memory has {size} bytes, not {_HEADER + RING_BYTES}",
                reason="SHM_MEMORY",
            )
        return cls(descriptor, size)

    def write_frame(self, pieces: Sequence[bytes | memoryview], size: int) -> int | None:
        """Write a frame of `size` bytes and return its offset, or None if there is no space.

        `pieces` are the consecutive parts of the frame. If there are two and the second is memory
        of `reserve_frame`, only the first is copied, to the bytes before that memory.
        """
        frame = self._in_place(pieces)
        if frame is not None:
            start = _offset_of(frame.start) - len(pieces[0])
            self._copy(start, pieces[:1])
        else:
            found = self._free_bytes(size)
            if found is None:
                return None
            self._copy(found, pieces)
            frame = _Frame(start := found)
            self._head = start + size
            self._unread.append(frame)
        self._written += 1
        frame.number, self._last = self._written, frame
        return start

    def _copy(self, start: int, pieces: Sequence[bytes | memoryview]) -> None:
        memory, end = self._bytes, _HEADER + start
        for piece in pieces:
            begin, end = end, end + len(piece)
            memory[begin:end] = piece

    def undo_write(self) -> None:
        """Undo the last write. The reader must not have been told of it yet."""
        frame, self._last = self._last, None
        assert frame is not None
        self._written -= 1
        frame.number = 0
        if frame.place is None:
            self._head = self._unread.pop().start

    def pin_memory(self, pin: Callable[[NDArray[np.uint8]], bool]) -> None:
        """Pin the memory by calling `pin`, so that a device can copy to and from it asynchronously
        until the ring is closed. `pin` returns whether it succeeded. If it did not, `reserve_frame`
        returns None, and copies from views of frames to a device take longer."""
        memory = np.frombuffer(self._memory, np.uint8)
        self._memory_array = memory if pin(memory) else None

    def reserve_frame(self, size: int) -> NDArray[np.uint8] | None:
        """Reserve `size` bytes into which a device can write, and return them as an array. Returns
        None if there is no space, if the memory is not pinned, or if `size` exceeds
        MAX_RESERVED_BYTES.

        To send the array without a copy, pass a view that begins at its first byte to `write_frame`
        as the second of two pieces. The space is reused once the array is garbage-collected and the
        reader has finished the frame.
        """
        if self._memory_array is None or size > MAX_RESERVED_BYTES:
            return None
        whole = FRAME_HEADER_BYTES + _ALIGNMENT + size
        start = self._free_bytes(whole)
        if start is None:
            return None
        begin = _HEADER + _offset_of(start)
        place = np.frombuffer(self._memory_array.data[begin : begin + size], np.uint8)
        frame = _Frame(start, place=weakref.ref(place), address=place.ctypes.data)
        self._reserved[frame.address] = frame
        self._head = start + whole
        self._unread.append(frame)
        return place

    def _in_place(self, pieces: Sequence[bytes | memoryview]) -> _Frame | None:
        """Return the reserved frame whose place holds the second of two pieces, or None."""
        if not self._reserved or len(pieces) != 2 or not pieces[1]:
            return None
        if len(pieces[0]) > FRAME_HEADER_BYTES:
            return None
        frame = self._reserved.get(np.frombuffer(pieces[1], np.uint8).ctypes.data)
        # A place can be sent only once.
        return None if frame is None or frame.number else frame

    def read_frame(self, offset: int, size: int) -> bytes:
        """Return a copy of the next frame. The writer can change the frame until this method
        returns, and may reuse its space afterwards. Raises InvalidMessageError for a position
        outside the ring."""
        frame = bytes(self._frame(offset, size))
        with self._lending:
            self._written += 1
            self._tell_done()
        return frame

    def view_frame(self, offset: int, size: int) -> bytes | memoryview:
        """Return a view of the next frame. The writer can change the frame at any time, so data
        must be copied before it is checked.

        The space is reused once nothing refers to the view. While such views hold half of the ring
        or more, a copy is returned instead. Raises InvalidMessageError for a position outside the
        ring.
        """
        place = self._frame(offset, size)
        if self._lent_bytes + size > self._size // 2:
            return self.read_frame(offset, size)
        held = np.frombuffer(place, np.uint8)
        with self._lending:
            self._written += 1
            self._lent_bytes += size
            self._lent.append(self._written)
        weakref.finalize(held, self._give_back, self._written, size).atexit = False
        return held.data.toreadonly()

    def _frame(self, offset: int, size: int) -> memoryview:
        if size > self._size or offset > self._size - size:
            raise InvalidMessageError(
                f"{size} bytes at {offset} of a shared-memory channel", reason="SHM_FRAME"
            )
        return self._bytes[_HEADER + offset : _HEADER + offset + size]

    def _give_back(self, number: int, size: int) -> None:
        with self._lending:
            self._back.add(number)
            self._lent_bytes -= size
            self._tell_done()

    def _tell_done(self) -> None:
        """Tell the writer that all frames before the first lent one are finished."""
        if self._telling or self._closed:
            # The loop below handles frames that are given back meanwhile.
            return
        self._telling = True
        while self._lent and self._lent[0] in self._back:
            self._back.remove(self._lent.popleft())
        self._done[0] = self._lent[0] - 1 if self._lent else self._written
        self._telling = False

    def close(self) -> None:
        """Unmap the memory. If views of frames still exist, it is unmapped when the last one is
        gone. Idempotent."""
        with self._lending:
            self._closed = True
            self._done.release()
        self._memory_array = None
        try:
            self._bytes.release()
            self._memory.close()
        except BufferError:
            # The last view unmaps the memory.
            pass

    def _free_bytes(self, size: int) -> int | None:
        done = self._done[0]
        while self._unread and self._unread[0].is_over(done):
            self._reserved.pop(self._unread.popleft().address, None)
        if not self._unread:
            # Start again at offset 0: recently used memory is in the CPU caches.
            return 0 if size <= self._size else None
        oldest = self._unread[0].start
        if self._head <= oldest:
            return self._head if self._head + size <= oldest else None
        if self._head + size <= self._size:
            return self._head
        return 0 if size <= oldest else None


def _offset_of(start: int) -> int:
    """Return the offset of the place of a frame whose space begins at `start`."""
    return -(-(start + FRAME_HEADER_BYTES) // _ALIGNMENT) * _ALIGNMENT
