"""Projected features of live sessions, in host memory, for drafters that must be caught up.

H width of a feature. Arrays hold the wire's element type (bfloat16 as uint16 bit patterns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.ids import SessionId

CHUNK: Final = 32
"""Positions that are held together."""
SLAB_BYTES: Final = 32 << 20
"""Memory that is taken at once."""
FEW: Final = 4
"""Rows that are faster written one by one than together."""


@dataclass(slots=True, eq=False)
class _Held:
    seat: int
    """Its place in the store's columns."""
    chunks: list[int] = field(default_factory=list)
    """Numbers of its chunks; the last one may be partly used."""


class FeatureStore:
    """Features by session, positions 0, 1, 2, ... without a gap; bounded in bytes.

    What sessions hold counts against the budget. A session that would exceed it loses its features
    for good (`complete` says so) and goes on without. Chunks of sessions that ended are used again:
    memory that nobody has touched yet costs more than what is written into it. They lie in slabs:
    so a round's rows, one of each session, are written by one call.
    """

    def __init__(self, *, width: int, dtype: DTypeLike, budget_bytes: int) -> None:
        self._width = width
        self._dtype = np.dtype(dtype)
        self._budget = budget_bytes
        self._held: dict[SessionId, _Held] = {}
        self._row_bytes = width * self._dtype.itemsize
        self._slab_rows = CHUNK * max(1, SLAB_BYTES // (CHUNK * self._row_bytes))
        self._slabs: list[NDArray[np.generic]] = []
        """[slab rows, H] each."""
        self._whole_row = np.dtype((np.void, self._row_bytes))
        """A row as one element: numpy scatters rows of narrow elements one by one of these."""
        self._free: list[int] = []
        """Numbers of chunks that nobody holds."""
        self._used = np.zeros(0, dtype=np.int64)
        """Positions held, by seat."""
        self._bases = np.zeros(0, dtype=np.int64)
        """Where the last chunk begins, in rows of all slabs, by seat."""
        self._free_seats: list[int] = []
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all features held."""
        return self._used_bytes

    def open(self, session_id: SessionId) -> None:
        """Start keeping features of a session."""
        self.close(session_id)
        if not self._free_seats:
            count = len(self._used)
            more = max(8, count)
            self._used, self._bases = (
                np.concatenate((column, np.zeros(more, dtype=np.int64)))
                for column in (self._used, self._bases)
            )
            self._free_seats = list(range(count + more - 1, count - 1, -1))
        seat = self._free_seats.pop()
        self._used[seat] = 0
        self._held[session_id] = _Held(seat)

    def complete(self, session_id: SessionId) -> bool:
        """Whether every position's feature so far is held."""
        return session_id in self._held

    def append(self, session_id: SessionId, rows: NDArray[np.generic]) -> None:
        """Add features [m, H] of the next positions, which are copied; no-op for a session without
        any."""
        held = self._held.get(session_id)
        if held is None:
            return
        count = len(rows)
        if self._used_bytes + count * self._row_bytes > self._budget:
            self.close(session_id)
            return
        self._used_bytes += count * self._row_bytes
        used, done = int(self._used[held.seat]), 0
        while done < count:
            place = used % CHUNK
            if not place:
                self._begin_chunk(held)
            taken = min(count - done, CHUNK - place)
            slab, start = divmod(held.chunks[-1] * CHUNK + place, self._slab_rows)
            self._slabs[slab][start : start + taken] = rows[done : done + taken]
            used += taken
            done += taken
        self._used[held.seat] = used

    def append_each(
        self, session_ids: Sequence[SessionId], rows: NDArray[np.generic], places: Sequence[int]
    ) -> None:
        """Add the next position's feature of each of these n sessions, all different: of rows
        [m, H] those at `places` [n], which are copied; no-op for those without any."""
        needed = self._used_bytes + len(places) * self._row_bytes
        try:
            held = [self._held[name] for name in session_ids]
        except KeyError:
            held = []
        if len(held) < FEW or needed > self._budget:
            for place, session_id in zip(places, session_ids, strict=True):
                self.append(session_id, rows[place : place + 1])
            return
        self._used_bytes = needed
        seats = np.array([each.seat for each in held])
        used = self._used[seats]
        within = used % CHUNK
        for index in np.flatnonzero(within == 0).tolist():
            self._begin_chunk(held[index])
        self._used[seats] = used + 1
        whole = self._whole(np.ascontiguousarray(rows))
        if len(places) < len(rows):
            whole = whole[np.array(places)]
        self._write(self._bases[seats] + within, whole)

    def read(self, session_id: SessionId, start: int, stop: int) -> NDArray[np.generic]:
        """[stop - start, H] of positions start .. stop, at least one; they must be held."""
        held = self._held[session_id]
        used = int(self._used[held.seat])
        assert start < stop <= used, (start, stop, used)
        first, last = start // CHUNK, (stop - 1) // CHUNK
        begin, end = start - first * CHUNK, stop - first * CHUNK
        chunks = [self._chunk(number) for number in held.chunks[first : last + 1]]
        return (chunks[0] if first == last else np.concatenate(chunks))[begin:end]

    def close(self, session_id: SessionId) -> None:
        """Free a session's features; idempotent."""
        held = self._held.pop(session_id, None)
        if held is None:
            return
        self._used_bytes -= int(self._used[held.seat]) * self._row_bytes
        self._free += held.chunks
        self._free_seats.append(held.seat)

    def _write(self, places: NDArray[np.int64], whole: NDArray[np.void]) -> None:
        """Whole rows [n] to these rows of all slabs."""
        slabs, within = np.divmod(places, self._slab_rows)
        concerned = set(slabs.tolist())
        if len(concerned) == 1:
            self._whole(self._slabs[concerned.pop()])[within] = whole
            return
        for slab in concerned:
            mine = slabs == slab
            self._whole(self._slabs[slab])[within[mine]] = whole[mine]

    def _whole(self, rows: NDArray[np.generic]) -> NDArray[np.void]:
        """Rows [n, H], each as one element [n]."""
        return rows.view(self._whole_row)[:, 0]

    def _begin_chunk(self, held: _Held) -> None:
        if not self._free:
            each = self._slab_rows // CHUNK
            first = len(self._slabs) * each
            self._slabs.append(np.empty((self._slab_rows, self._width), self._dtype))
            self._free = list(range(first + each - 1, first - 1, -1))
        held.chunks.append(self._free.pop())
        self._bases[held.seat] = held.chunks[-1] * CHUNK

    def _chunk(self, number: int) -> NDArray[np.generic]:
        """[CHUNK, H]"""
        slab, start = divmod(number * CHUNK, self._slab_rows)
        return self._slabs[slab][start : start + CHUNK]
