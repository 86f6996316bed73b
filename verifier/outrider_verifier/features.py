"""Projected features of live sessions, in host memory, for drafters that must be caught up.

H width of a feature. Arrays hold the wire's element type (bfloat16 as uint16 bit patterns).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.ids import SessionId


@dataclass(slots=True)
class _Buffer:
    rows: NDArray[np.generic]
    used: int = 0


class FeatureStore:
    """Features by session, positions 0, 1, 2, ... without a gap; bounded in bytes.

    A buffer of the session's full length is reserved as address space only: the system backs
    the pages that are written, and only those count against the budget. A session that would
    exceed it loses its features for good (`complete` says so) and goes on without.
    """

    def __init__(self, *, width: int, dtype: DTypeLike, budget_bytes: int) -> None:
        self._width = width
        self._dtype = np.dtype(dtype)
        self._budget = budget_bytes
        self._buffers: dict[SessionId, _Buffer] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all features held."""
        return self._used_bytes

    def open(self, session_id: SessionId, max_len: int) -> None:
        """Start keeping features of a session of at most `max_len` positions."""
        self._buffers[session_id] = _Buffer(np.empty((max_len, self._width), self._dtype))

    def complete(self, session_id: SessionId) -> bool:
        """Whether every position's feature so far is held."""
        return session_id in self._buffers

    def append(self, session_id: SessionId, rows: NDArray[np.generic]) -> None:
        """Add features [m, H] of the next positions; no-op for a session without a buffer."""
        buffer = self._buffers.get(session_id)
        if buffer is None:
            return
        if self._used_bytes + rows.nbytes > self._budget:
            self.close(session_id)
            return
        buffer.rows[buffer.used : buffer.used + len(rows)] = rows
        buffer.used += len(rows)
        self._used_bytes += rows.nbytes

    def read(self, session_id: SessionId, start: int, stop: int) -> NDArray[np.generic]:
        """A view [stop - start, H] of positions start .. stop; they must be held."""
        buffer = self._buffers[session_id]
        assert stop <= buffer.used, (stop, buffer.used)
        return buffer.rows[start:stop]

    def close(self, session_id: SessionId) -> None:
        """Free a session's features; idempotent."""
        buffer = self._buffers.pop(session_id, None)
        if buffer is not None:
            self._used_bytes -= buffer.used * self._width * self._dtype.itemsize
