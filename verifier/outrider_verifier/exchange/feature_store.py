"""Projected features of live sessions in host memory, for drafters that must catch up.

H width of a feature. Arrays hold the wire's element type (bfloat16 as uint16 bit patterns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

FEATURE_BLOCK_TOKENS: Final = 16
"""Positions that are held together, at most."""
SLAB_BYTES: Final = 32 << 20
"""Memory that is taken at once."""
MAX_SINGLE_ROWS: Final = 3
"""Rows that are faster written one by one than together are fewer."""
_UNKEPT: Final = -1


class FeatureStore:
    """Features by session, positions 0, 1, 2, ... without a gap; bounded in bytes.

    Sessions are named by their handles, small integers that index the store's columns. Stored
    features count against the budget. A session that would exceed it loses its features for good
    (`is_complete` turns False) and goes on without. Chunks of ended sessions are used again, since
    memory that was never touched costs more than writing into it. Chunks lie in slabs, so that one
    call writes the rows of a round, one of each session. A full chunk may have several owners,
    `PrefixCache` among them.
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
        """`max_sessions`: handles are smaller. `chunk`: positions that are held together."""
        self.chunk = chunk
        self._width = width
        self._dtype = np.dtype(dtype)
        self.budget_bytes = budget_bytes
        """Host memory that features may take; a session whose own exceed it keeps none."""
        self._row_bytes = width * self._dtype.itemsize
        # The first slab is taken at once: of a small budget it is no more than that.
        slab_chunks = min(slab_bytes, budget_bytes) // (self.chunk * self._row_bytes)
        self._slab_rows = self.chunk * max(1, slab_chunks)
        self._slabs: list[NDArray[np.generic]] = []
        """[slab rows, H] each."""
        self._row = np.dtype((np.void, self._row_bytes))
        """A row as one element: numpy scatters rows of narrow elements one by one of these."""
        self._free: list[int] = []
        """Numbers of chunks that nobody holds."""
        self._holders: list[int] = []
        """Of each chunk."""
        self._chunks: list[list[int]] = [[] for _ in range(max_sessions)]
        """Numbers of a session's chunks, by handle; the last one may be partly used."""
        self._next = np.full(max_sessions + 1, _UNKEPT)
        """Where a session's next position goes, in rows of all slabs, by handle; a multiple of
        `chunk`: to a chunk that is yet to be taken; _UNKEPT: without features. The last one is that
        of handle -1."""
        self._used_bytes = 0
        self.deferred: Callable[[], None] | None = None
        """What is yet to be added, see `later`."""
        # Touched now: a page that nobody has touched costs a round more than what it is for.
        self._add_slab().fill(0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.chunk * self._row_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all features held."""
        return self._used_bytes

    def defer(self, work: Callable[[], None]) -> None:
        """Leave for later what adds features, for as long as nobody looks at any: copying takes
        long, and what is waited for may be here before it is over. It must not raise, nor end a
        session: whoever looks is at work with them."""
        self.run_deferred()
        self.deferred = work

    def run_deferred(self) -> None:
        """Do what was left."""
        work, self.deferred = self.deferred, None
        if work is not None:
            work()

    def open(self, handle: int) -> None:
        """Start keeping features of a session."""
        self.close(handle)
        self._next[handle] = 0

    def is_complete(self, handle: int) -> bool:
        """Whether every position's feature so far is held."""
        self.run_deferred()
        return int(self._next[handle]) != _UNKEPT

    def num_held(self, handle: int) -> int:
        """Positions of a session whose features are held, from the first one on."""
        return self._used(handle) if self.is_complete(handle) else 0

    def has_room(self, count: int) -> bool:
        """Whether so many positions more fit the budget."""
        self.run_deferred()
        return self._used_bytes + count * self._row_bytes <= self.budget_bytes

    def full_blocks(self, handle: int) -> list[int]:
        """Numbers of a session's chunks that are full."""
        self.run_deferred()
        return self._chunks[handle][: self.num_held(handle) // self.chunk]

    def chunk_rows(self, number: int) -> NDArray[np.generic]:
        """[chunk, H] of a chunk."""
        slab, start = divmod(number * self.chunk, self._slab_rows)
        return self._slabs[slab][start : start + self.chunk]

    def pin_block(self, number: int) -> None:
        """Have a full chunk stay when its session closes."""
        self._holders[number] += 1

    def unpin_chunk(self, number: int) -> None:
        """Hold a chunk no longer."""
        self._holders[number] -= 1
        if not self._holders[number]:
            self._free.append(number)

    def share_chunks(self, handle: int, chunks: Sequence[int]) -> None:
        """The next positions of a session are those of chunks that are full and held; its last one
        must be full, too, and there must be room for them."""
        self.run_deferred()
        assert self.is_complete(handle) and self.has_room(len(chunks) * self.chunk)
        assert not self._next[handle] % self.chunk
        for number in chunks:
            self.pin_block(number)
        self._chunks[handle] += chunks
        self._next[handle] = 0
        self._used_bytes += len(chunks) * self.chunk * self._row_bytes

    def append(self, handle: int, rows: NDArray[np.generic]) -> None:
        """Add features [m, H] of the next positions, which are copied; no-op for a session without
        any."""
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
        """Append the feature of the next position to each of n sessions. `sessions`: distinct
        handles; `rows` [n, H] are copied. Sessions whose features are not kept are skipped; -1 is
        never a valid handle."""
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
        """Positions start .. stop, at least one, as pieces [m, H]; they must be held. Views: what
        is still needed when the session may have ended has to be copied."""
        self.run_deferred()
        used = self._used(handle)
        assert start < stop <= used, (start, stop, used)
        first, last = start // self.chunk, (stop - 1) // self.chunk
        chunks = [self.chunk_rows(number) for number in self._chunks[handle][first : last + 1]]
        chunks[-1] = chunks[-1][: stop - last * self.chunk]
        chunks[0] = chunks[0][start - first * self.chunk :]
        return chunks

    def close(self, handle: int) -> None:
        """Free a session's features; idempotent."""
        if not self.is_complete(handle):
            return
        self._used_bytes -= self._used(handle) * self._row_bytes
        self._next[handle] = _UNKEPT
        for number in self._chunks[handle]:
            self.unpin_chunk(number)
        self._chunks[handle] = []

    def _used(self, handle: int) -> int:
        """Positions held."""
        chunks = self._chunks[handle]
        return len(chunks) * self.chunk - int(-self._next[handle] % self.chunk)

    def _write(self, places: NDArray[np.int64], elements: NDArray[np.void]) -> None:
        """Rows, each as one element [n], to these rows of all slabs."""
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
        """Rows [n, H], each as one element [n]."""
        return rows.view(self._row)[:, 0]

    def _begin_chunk(self, handle: int) -> int:
        """Where it begins."""
        if not self._free:
            self._add_slab()
        number = self._free.pop()
        self._holders[number] = 1
        self._chunks[handle].append(number)
        return number * self.chunk

    def _add_slab(self) -> NDArray[np.generic]:
        """Take memory for more chunks, none of which is free now."""
        each = self._slab_rows // self.chunk
        first = len(self._slabs) * each
        slab = np.empty((self._slab_rows, self._width), self._dtype)
        self._slabs.append(slab)
        self._holders += [0] * each
        self._free = list(range(first + each - 1, first - 1, -1))
        return slab
