"""Session handles: small integers that index the per-session columns.

A handle also names its session to a drafter.
"""

from __future__ import annotations

from heapq import heappop, heappush

from outrider_verifier.state.session import Session


class SessionHandles:
    """Assigns handles 0 .. count - 1; the lowest free one is next, so that columns stay dense.

    Engine thread only.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._owners: list[Session | None] = [None] * count
        self._free = list(range(count))
        """A heap."""

    def assign(self, session: Session) -> None:
        """A handle for a session that has none; one must be free."""
        session.handle = heappop(self._free)
        self._owners[session.handle] = session

    def release(self, session: Session) -> None:
        """The session needs its handle no more."""
        self._owners[session.handle] = None
        heappush(self._free, session.handle)
        session.handle = -1

    def get_owner(self, handle: int) -> Session:
        """The session that has a handle; there must be one."""
        session = self._owners[handle]
        assert session is not None, handle
        return session

    def clear(self) -> None:
        """Take all handles back from whoever has them."""
        for session in self._owners:
            if session is not None:
                session.handle = -1
        self._owners = [None] * self.count
        self._free = list(range(self.count))
