"""A ring of memory that two processes share: one writes frames into it, the other takes them out.

Where a frame lies is said elsewhere (`Lane`); the ring only knows what may be written over. Its
first word is the reader's: how many frames, from the first on, it is done with.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError

RING_BYTES: Final = 16 << 20
"""Size of a ring: some rounds of the largest batch, features included."""
_HEADER: Final = 4096
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def is_lent(values: NDArray[np.generic]) -> bool:
    """Whether an array looks at a frame where it lies in a ring, which others wait for."""
    base: object = values
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, np.ndarray)


class Ring:
    """One direction; either side holds the same memory."""

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
        self._unread: deque[tuple[int, int]] = deque()
        """(number, start) of the frames that the reader may not be done with."""
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
    def make() -> int:
        """A descriptor of zeroed memory that nobody can shrink under its readers."""
        descriptor = os.memfd_create("outrider-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _HEADER + RING_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @classmethod
    def of(cls, descriptor: int) -> Ring:
        """The ring in a descriptor that a peer sent; it stays the caller's. Raises
        InvalidMessageError for memory that the peer could take away, or of another size."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise InvalidMessageError("a lane's memory is not sealed", reason="LANE_MEMORY")
        size = os.fstat(descriptor).st_size
        if size != _HEADER + RING_BYTES:
            raise InvalidMessageError(
                f"a lane's memory has {size} bytes, not {_HEADER + RING_BYTES}",
                reason="LANE_MEMORY",
            )
        return cls(descriptor, size)

    def write(self, pieces: Sequence[bytes | memoryview], size: int) -> int | None:
        """Copy a frame of `size` bytes in; its offset, or None while there is no room for it."""
        start = self._room(size)
        if start is None:
            return None
        memory, end = self._bytes, _HEADER + start
        for piece in pieces:
            begin, end = end, end + len(piece)
            memory[begin:end] = piece
        self._head = start + size
        self._written += 1
        self._unread.append((self._written, start))
        return start

    def take_back(self) -> None:
        """Forget the frame that was written last; nobody was told of it."""
        _, self._head = self._unread.pop()
        self._written -= 1

    def read(self, offset: int, size: int) -> bytes:
        """Copy the next frame out: its writer may change it until then, and may use its place
        again from here on. Raises InvalidMessageError for a place outside."""
        frame = bytes(self._place(offset, size))
        with self._lending:
            self._written += 1
            self._tell_done()
        return frame

    def lend(self, offset: int, size: int) -> bytes | memoryview:
        """The next frame where it lies: its writer may change it at any time, so that what is
        checked has to be copied before. Its place is used again once nothing refers to it any more;
        while half of the ring is lent, a copy. Raises as `read`."""
        place = self._place(offset, size)
        if self._lent_bytes + size > self._size // 2:
            return self.read(offset, size)
        held = np.frombuffer(place, np.uint8)
        with self._lending:
            self._written += 1
            self._lent_bytes += size
            self._lent.append(self._written)
        weakref.finalize(held, self._give_back, self._written, size).atexit = False
        return held.data.toreadonly()

    def _place(self, offset: int, size: int) -> memoryview:
        if size > self._size or offset > self._size - size:
            raise InvalidMessageError(f"{size} bytes at {offset} of a lane", reason="LANE_FRAME")
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
        try:
            self._bytes.release()
            self._memory.close()
        except BufferError:
            # The last of them unmaps it.
            pass

    def _room(self, size: int) -> int | None:
        done = self._done[0]
        while self._unread and self._unread[0][0] <= done:
            self._unread.popleft()
        if not self._unread:
            # From the start again: memory that was used a moment ago is in the caches.
            return 0 if size <= self._size else None
        oldest = self._unread[0][1]
        if self._head <= oldest:
            return self._head if self._head + size <= oldest else None
        if self._head + size <= self._size:
            return self._head
        return 0 if size <= oldest else None
