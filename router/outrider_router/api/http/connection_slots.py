"""Connection slots of an HTTP server: a limit on connections, and eviction of idle ones.

A connection holds a slot from the moment it is accepted, so one that is silent before its TLS
handshake counts like any other. Connections that have sent nothing are evicted first: a client
that has a request sends it at once.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from itertools import chain
from typing import Final, Protocol

MAX_REFUSALS: Final = 256
"""Largest number of connections without a slot that receive a refusal at once; further ones are
closed."""
CONNECTIONS_EXHAUSTED: Final = "CONNECTIONS_EXHAUSTED"


class SlotHolder(Protocol):
    """Interface of a connection that `ConnectionSlots` manages."""

    @property
    def is_sent(self) -> bool:
        """Whether everything that was answered has been sent."""
        ...

    def close_now(self) -> None:
        """Close the connection at once."""


def max_connections(wanted: int) -> int:
    """Return `wanted`, or half of the files that the process may open if that is less.

    A quarter of the files is for gRPC, and the last quarter is a reserve for everything else.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files < 0 else min(wanted, max(1, files // 2))


class ConnectionSlots:
    """Connections of one server that hold a slot, and the idle ones among them."""

    def __init__(self, most: int, on_refused: Callable[[], None]) -> None:
        """`on_refused` hears of each connection that finds no place."""
        self._most = most
        self._on_refused = on_refused
        self._held: set[SlotHolder] = set()
        self._silent: dict[SlotHolder, None] = {}
        """Those that have sent nothing yet, in the order in which they came."""
        self._idle: dict[SlotHolder, None] = {}
        """Others that wait for no answer, in the order in which they became idle."""
        self._refused = 0
        """Connections without a place that are about to hear so."""

    def acquire_slot(self, holder: SlotHolder) -> bool:
        """Give a new connection a slot, if necessary that of an idle one; return whether it has
        one."""
        if len(self._held) >= self._most and not self.evict_idle():
            return False
        self._held.add(holder)
        self._silent[holder] = None
        return True

    def evict_idle(self) -> bool:
        """Close the connection that was silent longest, or else idle longest; return whether there
        was one."""
        waiting = chain(self._silent, self._idle)
        oldest = next((held for held in waiting if held.is_sent), None)
        if oldest is None:
            return False
        self.release_slot(oldest)
        oldest.close_now()
        return True

    def record_refusal(self) -> bool:
        """Count a connection without a slot; return whether it may receive a refusal."""
        self._on_refused()
        if self._refused >= MAX_REFUSALS:
            return False
        self._refused += 1
        return True

    def forget_refusal(self) -> None:
        """Record that a refused connection is closed."""
        self._refused -= 1

    def release_slot(self, holder: SlotHolder) -> None:
        """Release the slot of a closed connection. Idempotent."""
        self._held.discard(holder)
        self.mark_busy(holder)

    def mark_busy(self, holder: SlotHolder) -> None:
        """Mark a connection as busy with a request."""
        self._silent.pop(holder, None)
        self._idle.pop(holder, None)

    def mark_idle(self, holder: SlotHolder) -> None:
        """Mark a connection as idle."""
        if holder in self._held:
            self._silent.pop(holder, None)
            self._idle[holder] = None
