"""A ring of memory that two processes share: one writes frames into it, the other copies them out.

Where a frame lies is said elsewhere (`Lane`); the ring only knows what may be written over. Its
first word is the reader's: how many frames it has copied out so far.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Final

from outrider.errors import InvalidMessageError

RING_BYTES: Final = 16 << 20
"""Size of a ring: some rounds of the largest batch, features included."""
_HEADER: Final = 4096
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Ring:
    """One direction; either side holds the same memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map a descriptor of `size` bytes; it stays the caller's."""
        self._memory = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._memory)
        self._copied = self._bytes[:8].cast("Q")
        self._size = size - _HEADER
        self._head = 0
        """Where the next frame goes, if there is room."""
        self._written = 0
        """Frames written, of a writer; copied out, of a reader."""
        self._unread: deque[tuple[int, int]] = deque()
        """(number, start) of the frames that the reader may not have copied out."""

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
        if size > self._size or offset > self._size - size:
            raise InvalidMessageError(f"{size} bytes at {offset} of a lane", reason="LANE_FRAME")
        frame = bytes(self._bytes[_HEADER + offset : _HEADER + offset + size])
        self._written += 1
        self._copied[0] = self._written
        return frame

    def close(self) -> None:
        """Unmap the memory; idempotent."""
        self._copied.release()
        self._bytes.release()
        self._memory.close()

    def _room(self, size: int) -> int | None:
        copied = self._copied[0]
        while self._unread and self._unread[0][0] <= copied:
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
