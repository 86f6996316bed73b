"""Projected features of live sessions, in host memory, for drafters that must be caught up.

H width of a feature. Arrays hold the wire's element type (bfloat16 as uint16 bit patterns).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.ids import SessionId

CHUNK: Final = 32
"""Positions that are held together."""


@dataclass(slots=True)
class _Held:
    chunks: list[NDArray[np.generic]] = field(default_factory=list)
    """[CHUNK, H] each; the last one may be partly used."""
    used: int = 0
    """Positions."""


class FeatureStore:
    """Features by session, positions 0, 1, 2, ... without a gap; bounded in bytes.

    What sessions hold counts against the budget. A session that would exceed it loses its features
    for good (`complete` says so) and goes on without. Chunks of sessions that ended are used again,
    within the budget: memory that nobody has touched yet costs more than what is written into it.
    """

    def __init__(self, *, width: int, dtype: DTypeLike, budget_bytes: int) -> None:
        self._width = width
        self._dtype = np.dtype(dtype)
        self._budget = budget_bytes
        self._held: dict[SessionId, _Held] = {}
        self._free: list[NDArray[np.generic]] = []
        self._row_bytes = width * self._dtype.itemsize
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all features held."""
        return self._used_bytes

    def open(self, session_id: SessionId) -> None:
        """Start keeping features of a session."""
        self._held[session_id] = _Held()

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
        done = 0
        while done < count:
            place = held.used % CHUNK
            if not place:
                held.chunks.append(self._chunk())
            taken = min(count - done, CHUNK - place)
            held.chunks[-1][place : place + taken] = rows[done : done + taken]
            held.used += taken
            done += taken

    def read(self, session_id: SessionId, start: int, stop: int) -> NDArray[np.generic]:
        """[stop - start, H] of positions start .. stop, at least one; they must be held."""
        held = self._held[session_id]
        assert start < stop <= held.used, (start, stop, held.used)
        first, last = start // CHUNK, (stop - 1) // CHUNK
        begin, end = start - first * CHUNK, stop - first * CHUNK
        if first == last:
            return held.chunks[first][begin:end]
        return np.concatenate(held.chunks[first : last + 1])[begin:end]

    def close(self, session_id: SessionId) -> None:
        """Free a session's features; idempotent."""
        held = self._held.pop(session_id, None)
        if held is None:
            return
        self._used_bytes -= held.used * self._row_bytes
        spare = (self._budget - self._used_bytes) // (CHUNK * self._row_bytes) - len(self._free)
        self._free += held.chunks[: max(0, spare)]

    def _chunk(self) -> NDArray[np.generic]:
        if self._free:
            return self._free.pop()
        return np.empty((CHUNK, self._width), self._dtype)
