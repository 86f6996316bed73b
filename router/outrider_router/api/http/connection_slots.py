"""Connection slots of an HTTP server: a limit on connections, and eviction of idle ones.

A connection holds a slot from the moment it is accepted, so it counts even before its TLS
handshake. Connections that have sent nothing are evicted first, because a client with a request
sends it at once.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from itertools import chain
from typing import Final, Protocol

MAX_REFUSALS: Final = 256
"""Largest number of connections without a slot that may receive a refusal at the same time. Further
connections are closed without one.
"""
CONNECTIONS_EXHAUSTED: Final = "CONNECTIONS_EXHAUSTED"


class SlotHolder(Protocol):
    """Interface of a connection that `ConnectionSlots` manages."""

    @property
    def is_sent(self) -> bool:
        """Whether all output of the connection has been sent."""
        ...

    def close_now(self) -> None:
        """Close the connection at once."""


def max_connections(wanted: int) -> int:
    """Return `wanted`, or half of the number of files that the process may open if that is less.

    A quarter of the files is for gRPC, and the last quarter is a reserve for everything else.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files < 0 else min(wanted, max(1, files // 2))


class ConnectionSlots:
    """Connections of one server that hold a slot, and the idle ones among them."""

    def __init__(self, most: int, on_refused: Callable[[], None]) -> None:
        """Create `most` free slots. `on_refused` is called for each connection that gets no
        slot.
        """
        self._most = most
        self._on_refused = on_refused
        self._held: set[SlotHolder] = set()
        self._silent: dict[SlotHolder, None] = {}
        """Connections that have sent nothing yet, in the order of acceptance."""
        self._idle: dict[SlotHolder, None] = {}
        """Other connections without a request in progress, in the order in which they became
        idle.
        """
        self._refused = 0
        """Number of connections without a slot that are about to receive a refusal."""

    def acquire_slot(self, holder: SlotHolder) -> bool:
        """Give a new connection a slot. If none is free, close an idle connection and give its slot
        to the new one. Return False if no connection is idle either.
        """
        if len(self._held) >= self._most and not self.evict_idle():
            return False
        self._held.add(holder)
        self._silent[holder] = None
        return True

    def evict_idle(self) -> bool:
        """Close the oldest connection that has sent nothing yet. If there is none, close the
        connection that has been idle longest. Return False if there is neither.
        """
        waiting = chain(self._silent, self._idle)
        oldest = next((held for held in waiting if held.is_sent), None)
        if oldest is None:
            return False
        self.release_slot(oldest)
        oldest.close_now()
        return True

    def record_refusal(self) -> bool:
        """Count a connection without a slot. Return whether it may receive an error response before
        it is closed.
        """
        self._on_refused()
        if self._refused >= MAX_REFUSALS:
            return False
        self._refused += 1
        return True

    def forget_refusal(self) -> None:
        """Record that a connection that received a refusal is closed."""
        self._refused -= 1

    def release_slot(self, holder: SlotHolder) -> None:
        """Release the slot of a closed connection. Idempotent."""
        self._held.discard(holder)
        self.mark_busy(holder)

    def mark_busy(self, holder: SlotHolder) -> None:
        """Record that a connection has a request in progress."""
        self._silent.pop(holder, None)
        self._idle.pop(holder, None)

    def mark_idle(self, holder: SlotHolder) -> None:
        """Record that a connection has no request in progress."""
        if holder in self._held:
            self._silent.pop(holder, None)
            self._idle[holder] = None
