"""Ring buffer in memory shared by two processes: one writes frames, the other reads them.

`ShmChannel` sends the positions of frames; the ring only tracks the part that may be overwritten.
Its first word belongs to the reader: the number of frames that it has finished reading.

A device or another writer can write a frame in place: `RingBuffer.reserve_frame` reserves its
position beforehand, and the frame is sent without a copy.
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
"""Size of a ring: some rounds of the largest batch, features included."""
FRAME_HEADER_BYTES: Final = 32 << 10
"""Room before a place, for what is said of what lies there."""
MAX_RESERVED_BYTES: Final = RING_BYTES // 4 - FRAME_HEADER_BYTES
"""Bytes of a place, at most: two rounds are on their way while a third one is read."""
_HEADER: Final = 4096
_ALIGNMENT: Final = 64
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def is_ring_view(values: NDArray[np.generic]) -> bool:
    """Whether an array looks at a frame where it lies in a ring, which others wait for."""
    base: object = values
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, np.ndarray)


@dataclass(slots=True, eq=False)
class _Frame:
    """A part of a writer's ring that must not be written over yet."""

    start: int
    number: int = 0
    """Frames that the reader is done with, this one being the last of them; 0: it was not sent."""
    place: weakref.ref[NDArray[np.uint8]] | None = None
    """Where others write its content: theirs as long as anybody looks at it."""
    address: int = 0
    """Of the place."""

    def is_over(self, done: int) -> bool:
        """Whether nobody needs it, if the reader is done with so many."""
        return self.number <= done and (self.place is None or self.place() is None)


class RingBuffer:
    """One direction of a channel; writer and reader map the same memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map a descriptor of `size` bytes; it stays the caller's."""
        self._memory = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._memory)
        self._done = self._bytes[:8].cast("Q")
        self._size = size - _HEADER
        self._head = 0
        """Where the next frame goes, if there is room."""
        self._written = 0
        """Frames written, of a writer; taken out, of a reader."""
        self._unread: deque[_Frame] = deque()
        """Of a writer, in the order in which they got their room."""
        self._reserved: dict[int, _Frame] = {}
        """Those with places, by the address of the place."""
        self._last: _Frame | None = None
        """The frame that was written last."""
        self._memory_array: NDArray[np.uint8] | None = None
        """The memory, while it is pinned: as those who write into places see it; None: nobody
        may."""
        self._closed = False
        self._lent: deque[int] = deque()
        """Of a reader: numbers of the frames that were lent, but for the first of them that were
        given back."""
        self._back: set[int] = set()
        """Those of them that were given back."""
        self._lent_bytes = 0
        self._lending = threading.RLock()
        """A frame is given back by whichever thread looked at it last, if need be by the collector
        of garbage in the middle of this."""
        self._telling = False

    @staticmethod
    def create_memory() -> int:
        """A descriptor of zeroed memory that nobody can shrink under its readers."""
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
        """The ring in a descriptor that a peer sent; it stays the caller's. Raises
        InvalidMessageError for memory that the peer could take away, or of another size."""
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
        """Copy a frame of `size` bytes in, or of one that lies in a place what is before that; its
        offset, or None while there is no room for it."""
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
        """Forget the frame that was written last; nobody was told of it."""
        frame, self._last = self._last, None
        assert frame is not None
        self._written -= 1
        frame.number = 0
        if frame.place is None:
            self._head = self._unread.pop().start

    def pin_memory(self, pin: Callable[[NDArray[np.uint8]], bool]) -> None:
        """Have `pin` see to it that a device copies to and from the memory without anybody waiting,
        until the ring is closed. Where it cannot, there are no places (`reserve_frame`),
        and copies of what is lent take longer."""
        memory = np.frombuffer(self._memory, np.uint8)
        self._memory_array = memory if pin(memory) else None

    def reserve_frame(self, size: int) -> NDArray[np.uint8] | None:
        """A place of `size` bytes, for others to write into: what lies there can then be the second
        piece of a frame of two (`write`), from its first byte on, and is sent without being copied.
        The place is used again once nobody looks at the array any more, and the reader is done with
        the frame. None while there is no room, or where there are no places."""
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
        """The frame with the place in which the second of two pieces lies, if there is one."""
        if not self._reserved or len(pieces) != 2 or not pieces[1]:
            return None
        if len(pieces[0]) > FRAME_HEADER_BYTES:
            return None
        frame = self._reserved.get(np.frombuffer(pieces[1], np.uint8).ctypes.data)
        # A place is sent once.
        return None if frame is None or frame.number else frame

    def read_frame(self, offset: int, size: int) -> bytes:
        """Copy the next frame out: its writer may change it until then, and may use its place
        again from here on. Raises InvalidMessageError for a place outside."""
        frame = bytes(self._frame(offset, size))
        with self._lending:
            self._written += 1
            self._tell_done()
        return frame

    def view_frame(self, offset: int, size: int) -> bytes | memoryview:
        """The next frame where it lies: its writer may change it at any time, so that what is
        checked has to be copied before. Its place is used again once nothing refers to it any more;
        while half of the ring is lent, a copy. Raises as `read`."""
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
        """Tell the writer of all frames before the first one that is lent."""
        if self._telling or self._closed:
            # What is given back in the middle of this is seen by the loop below.
            return
        self._telling = True
        while self._lent and self._lent[0] in self._back:
            self._back.remove(self._lent.popleft())
        self._done[0] = self._lent[0] - 1 if self._lent else self._written
        self._telling = False

    def close(self) -> None:
        """Unmap the memory, or leave it to those who look at what was lent; idempotent."""
        with self._lending:
            self._closed = True
            self._done.release()
        self._memory_array = None
        try:
            self._bytes.release()
            self._memory.close()
        except BufferError:
            # The last of them unmaps it.
            pass

    def _free_bytes(self, size: int) -> int | None:
        done = self._done[0]
        while self._unread and self._unread[0].is_over(done):
            self._reserved.pop(self._unread.popleft().address, None)
        if not self._unread:
            # From the start again: memory that was used a moment ago is in the caches.
            return 0 if size <= self._size else None
        oldest = self._unread[0].start
        if self._head <= oldest:
            return self._head if self._head + size <= oldest else None
        if self._head + size <= self._size:
            return self._head
        return 0 if size <= oldest else None


def _offset_of(start: int) -> int:
    """Where the place of a frame begins that has its room from `start` on."""
    return -(-(start + FRAME_HEADER_BYTES) // _ALIGNMENT) * _ALIGNMENT
