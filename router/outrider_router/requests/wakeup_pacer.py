"""Wakeup pacer: wakes stream readers at once, or in batches while the router is behind.

A message to a client costs some tens of microseconds, most of them gRPC's, whatever its size. The
next round is passed on when most messages of the one before have been sent, and a little later, so
that what has arrived meanwhile is read first and sent with it. So a router that is behind does less
work for each event instead of falling further behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

MAX_SLOW_SHARE = 8
"""One reader in so many may take longer without holding up the others."""
MAX_DELAY_S = 0.02
"""Nobody waits longer than this for messages of others to leave."""
MIN_DELAY_S = 0.0005
"""A pause shorter than this is none: timers are not finer."""
PAUSE_SHARE = 0.25
"""Pause after a round of messages, as a share of what it took: then arrivals are read."""


class WakeableReader(Protocol):
    """A reader that waits for output."""

    def wake_reader(self) -> bool:
        """Look again; whether it was waiting."""
        ...


class WakeupPacer:
    """Wakes readers; one for all that share an event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._waiting: dict[WakeableReader, None] = {}
        """Readers for whom something has arrived since the last round was passed on."""
        self._busy: set[WakeableReader] = set()
        """Readers that were woken and have not come back for more."""
        self._slow = 0
        """So many of them may be left when the next round is passed on."""
        self._began = 0.0
        self._next = 0.0
        """Clock time before which no round is passed on."""
        self._timer: asyncio.TimerHandle | None = None

    def wake_readers(self, readers: Iterable[WakeableReader]) -> None:
        """Wake these, now or when those that were woken before have come back."""
        self._waiting.update(dict.fromkeys(readers))
        self._pass_on()

    def record_reader_return(self, reader: WakeableReader, *, more: bool = False) -> None:
        """A reader waits, or has left; `more`: something has arrived for it already."""
        if more:
            self._waiting[reader] = None
        if reader in self._busy:
            self._busy.discard(reader)
            if len(self._busy) == self._slow:
                now = self._clock()
                self._next = min(self._next, now + PAUSE_SHARE * (now - self._began))
        elif not more:
            return
        self._pass_on()

    def _pass_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        delay_s = self._next - self._clock()
        if delay_s > MIN_DELAY_S:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pass_on)
            return
        waiting, self._waiting = self._waiting, {}
        self._busy = {reader for reader in waiting if reader.wake_reader()}
        self._slow = len(self._busy) // MAX_SLOW_SHARE
        self._began = self._clock()
        self._next = self._began + (MAX_DELAY_S if self._busy else 0.0)
