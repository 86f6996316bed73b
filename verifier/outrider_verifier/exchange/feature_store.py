"""Projected features of live sessions in host memory, for drafters that must catch up.

Arrays have shape [rows, width], where `width` is the number of values of a feature. Their element
type is that of the wire format (bfloat16 as uint16 bit patterns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

FEATURE_BLOCK_TOKENS: Final = 16
"""Number of token positions per chunk of a `FeatureStore`."""
SLAB_BYTES: Final = 32 << 20
"""Size in bytes of a slab. A `FeatureStore` allocates its memory in slabs."""
MAX_SINGLE_ROWS: Final = 3
"""Number of rows from which one common write is faster than writing each row separately."""
_UNKEPT: Final = -1


class FeatureStore:
    """Stores the features of each session for its positions 0, 1, 2, ... without gaps, within a
    memory budget.

    Sessions are identified by their handles, small integers that index the arrays of the store. If
    the features of a session would exceed the budget, all its features are dropped, and none are
    stored again (`is_complete` returns False). Features are stored in chunks of a fixed number of
    positions. Chunks of ended sessions are reused, because the first write to newly allocated
    memory is slow. Chunks lie in large slabs, so that one numpy call can write one row for each
    session of a round. A full chunk may have several owners, for example several sessions and
    `PrefixCache`.
    """

    def __init__(
        self,
        *,
        width: int,
        dtype: DTypeLike,
        budget_bytes: int,
        max_sessions: int,
        chunk: int = FEATURE_BLOCK_TOKENS,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Create a store without sessions. `max_sessions` is the number of handles. `chunk` is the
        number of positions per chunk."""
        self.chunk = chunk
        self._width = width
        self._dtype = np.dtype(dtype)
        self.budget_bytes = budget_bytes
        """Maximum host memory for features, in bytes. If the features of a session would exceed it,
        all its features are dropped."""
        self._row_bytes = width * self._dtype.itemsize
        # The first slab is allocated at once. If the budget is small, the slab is no larger than
        # the budget.
        slab_chunks = min(slab_bytes, budget_bytes) // (self.chunk * self._row_bytes)
        self._slab_rows = self.chunk * max(1, slab_chunks)
        self._slabs: list[NDArray[np.generic]] = []
        """Slabs, each [rows per slab, width]."""
        self._row = np.dtype((np.void, self._row_bytes))
        """Type of a whole row as one element. With this type numpy scatters whole rows instead of
        single values, which is faster."""
        self._free: list[int] = []
        """Indices of free chunks."""
        self._holders: list[int] = []
        """Number of owners of each chunk."""
        self._chunks: list[list[int]] = [[] for _ in range(max_sessions)]
        """Indices of each session's chunks, by handle; the last chunk of a session may be partly
        used."""
        self._next = np.full(max_sessions + 1, _UNKEPT)
        """Row of all slabs for each session's next position, by handle. A multiple of `chunk` means
        that a new chunk is needed; `_UNKEPT` means that the session keeps no features. The last
        element belongs to handle -1."""
        self._used_bytes = 0
        self.deferred: Callable[[], None] | None = None
        """Function passed to `defer` that was not yet called; None if there is none."""
        # Write to the whole slab now, because the first write to a page would delay a round.
        self._add_slab().fill(0)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes."""
        return self.chunk * self._row_bytes

    @property
    def used_bytes(self) -> int:
        """Size of all stored features in bytes."""
        return self._used_bytes

    def defer(self, work: Callable[[], None]) -> None:
        """Store a function that adds features, and call it before the next access to any features.
        This keeps copying off the critical path of a round. The function must not raise or end a
        session."""
        self.run_deferred()
        self.deferred = work

    def run_deferred(self) -> None:
        """Call the function passed to `defer`, if it was not called yet."""
        work, self.deferred = self.deferred, None
        if work is not None:
            work()

    def open(self, handle: int) -> None:
        """Start to keep the features of a session."""
        self.close(handle)
        self._next[handle] = 0

    def is_complete(self, handle: int) -> bool:
        """Return whether the features of all positions of a session so far are stored."""
        self.run_deferred()
        return int(self._next[handle]) != _UNKEPT

    def num_held(self, handle: int) -> int:
        """Return the number of a session's positions whose features are stored, counted from the
        first position."""
        return self._used(handle) if self.is_complete(handle) else 0

    def has_room(self, count: int) -> bool:
        """Return whether the features of `count` more positions fit into the budget."""
        self.run_deferred()
        return self._used_bytes + count * self._row_bytes <= self.budget_bytes

    def full_blocks(self, handle: int) -> list[int]:
        """Return the indices of a session's full chunks, in the order of its positions. A chunk is
        full if it contains the features of `chunk` positions; only the session's last chunk may not
        be full."""
        self.run_deferred()
        return self._chunks[handle][: self.num_held(handle) // self.chunk]

    def chunk_rows(self, number: int) -> NDArray[np.generic]:
        """Return the features in the chunk with index `number`, as a view [positions per chunk,
        width]."""
        slab, start = divmod(number * self.chunk, self._slab_rows)
        return self._slabs[slab][start : start + self.chunk]

    def pin_block(self, number: int) -> None:
        """Add an owner to a full chunk, so that the chunk is kept when its session closes."""
        self._holders[number] += 1

    def unpin_chunk(self, number: int) -> None:
        """Remove an owner of a chunk. A chunk without owners becomes free."""
        self._holders[number] -= 1
        if not self._holders[number]:
            self._free.append(number)

    def share_chunks(self, handle: int, chunks: Sequence[int]) -> None:
        """Append full chunks of other owners to a session's features, without a copy. The session's
        last chunk must be full, too, and the budget must have room for the chunks."""
        self.run_deferred()
        assert self.is_complete(handle) and self.has_room(len(chunks) * self.chunk)
        assert not self._next[handle] % self.chunk
        for number in chunks:
            self.pin_block(number)
        self._chunks[handle] += chunks
        self._next[handle] = 0
        self._used_bytes += len(chunks) * self.chunk * self._row_bytes

    def append(self, handle: int, rows: NDArray[np.generic]) -> None:
        """Copy `rows` [number of positions, width] as the features of a session's next positions.
        Does nothing for a session that keeps no features. If the budget would be exceeded, the
        session loses all its features."""
        if not self.is_complete(handle):
            return
        count = len(rows)
        if self._used_bytes + count * self._row_bytes > self.budget_bytes:
            self.close(handle)
            return
        self._used_bytes += count * self._row_bytes
        place, done = int(self._next[handle]), 0
        while done < count:
            if not place % self.chunk:
                place = self._begin_chunk(handle)
            taken = min(count - done, self.chunk - place % self.chunk)
            slab, start = divmod(place, self._slab_rows)
            self._slabs[slab][start : start + taken] = rows[done : done + taken]
            place += taken
            done += taken
        self._next[handle] = place

    def append_each(self, sessions: Sequence[int], rows: NDArray[np.generic]) -> None:
        """Copy one row to each of several sessions, as the feature of the session's next position.
        `sessions` holds distinct handles, and `rows` is [number of sessions, width]. Sessions that
        keep no features and the handle -1 are skipped."""
        self.run_deferred()
        if len(sessions) < MAX_SINGLE_ROWS:
            for number, handle in enumerate(sessions):
                self.append(handle, rows[number : number + 1])
            return
        assert (rows.dtype, rows.shape[1]) == (self._dtype, self._width)
        handles = np.array(sessions)
        places, elements = self._next[handles], self._elements(np.ascontiguousarray(rows))
        if places.min() < 0:
            kept = np.flatnonzero(places >= 0)
            handles, places, elements = handles[kept], places[kept], elements[kept]
        needed = self._used_bytes + len(handles) * self._row_bytes
        if needed > self.budget_bytes:
            whole = elements.view(self._dtype).reshape(-1, self._width)
            for number, handle in enumerate(handles.tolist()):
                self.append(handle, whole[number : number + 1])
            return
        self._used_bytes = needed
        for number in np.flatnonzero(places % self.chunk == 0).tolist():
            places[number] = self._begin_chunk(int(handles[number]))
        self._next[handles] = places + 1
        self._write(places, elements)

    def read(self, handle: int, start: int, stop: int) -> list[NDArray[np.generic]]:
        """Return the features of positions `start` to `stop` - 1 (at least one) as a list of arrays
        [rows, width]. The features must be stored. The arrays are views that are valid only until
        the session ends."""
        self.run_deferred()
        used = self._used(handle)
        assert start < stop <= used, (start, stop, used)
        first, last = start // self.chunk, (stop - 1) // self.chunk
        chunks = [self.chunk_rows(number) for number in self._chunks[handle][first : last + 1]]
        chunks[-1] = chunks[-1][: stop - last * self.chunk]
        chunks[0] = chunks[0][start - first * self.chunk :]
        return chunks

    def close(self, handle: int) -> None:
        """Free a session's features. Does nothing if it has none."""
        if not self.is_complete(handle):
            return
        self._used_bytes -= self._used(handle) * self._row_bytes
        self._next[handle] = _UNKEPT
        for number in self._chunks[handle]:
            self.unpin_chunk(number)
        self._chunks[handle] = []

    def _used(self, handle: int) -> int:
        """Return the number of stored positions of a session."""
        chunks = self._chunks[handle]
        return len(chunks) * self.chunk - int(-self._next[handle] % self.chunk)

    def _write(self, places: NDArray[np.int64], elements: NDArray[np.void]) -> None:
        """Write rows, each one element of `elements` [n], to the rows `places` [n] of all slabs."""
        if len(self._slabs) == 1:
            self._elements(self._slabs[0])[places] = elements
            return
        slabs, within = np.divmod(places, self._slab_rows)
        concerned = set(slabs.tolist())
        if len(concerned) == 1:
            self._elements(self._slabs[concerned.pop()])[within] = elements
            return
        for slab in concerned:
            mine = slabs == slab
            self._elements(self._slabs[slab])[within[mine]] = elements[mine]

    def _elements(self, rows: NDArray[np.generic]) -> NDArray[np.void]:
        """Return rows [n, width] as an array [n] with one element per row."""
        return rows.view(self._row)[:, 0]

    def _begin_chunk(self, handle: int) -> int:
        """Start a new chunk for a session, and return the chunk's first row in all slabs."""
        if not self._free:
            self._add_slab()
        number = self._free.pop()
        self._holders[number] = 1
        self._chunks[handle].append(number)
        return number * self.chunk

    def _add_slab(self) -> NDArray[np.generic]:
        """Allocate a slab with more chunks. No chunk may be free before."""
        each = self._slab_rows // self.chunk
        first = len(self._slabs) * each
        slab = np.empty((self._slab_rows, self._width), self._dtype)
        self._slabs.append(slab)
        self._holders += [0] * each
        self._free = list(range(first + each - 1, first - 1, -1))
        return slab
