"""Pool of a client's gRPC channels, which replaces the current channel when its connection breaks.

After its server was down, a gRPC channel reconnects late: a synchronous channel 4.5 to 9.5 s after
the server is back, regardless of the reconnect options (grpcio 1.76, loopback). A new channel
connects immediately.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from outrider.client.attempts import MAX_ROUTER_LOOKUPS, is_elsewhere
from outrider.errors import CancelledRequestError, ConnectionLostError, OutriderError

ChannelT = TypeVar("ChannelT")

MAX_OLD_CHANNELS: Final = 2 * MAX_ROUTER_LOOKUPS
"""Maximum number of replaced channels that stay open. They stay open because other calls may still
use them."""


class ChannelPool(Generic[ChannelT]):
    """The channel for new calls, and the replaced channels that older calls may still use.
    Thread-safe."""

    def __init__(self, make: Callable[[], ChannelT]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._current = make()
        self._old: deque[ChannelT] = deque()
        self._closed = False

    @property
    def current(self) -> ChannelT:
        """Channel for the next call. Raises CancelledRequestError (CLIENT_CLOSED) if the client is
        closed."""
        self.check_open()
        return self._current

    def report_broken(self, channel: ChannelT, problem: OutriderError) -> ChannelT | None:
        """Replace `channel` if `problem`, the error of a call on it, is a connection error or says
        that another router may have the stream. Return an old channel that the caller must close,
        or None. Raises CancelledRequestError (CLIENT_CLOSED) if the client is closed."""
        self.check_open()
        # Another connection may lead to another router.
        if not (isinstance(problem, ConnectionLostError) or is_elsewhere(problem)):
            return None
        with self._lock:
            if channel is not self._current:
                return None
            self._old.append(channel)
            self._current = self._make()
            return self._old.popleft() if len(self._old) > MAX_OLD_CHANNELS else None

    def take_all(self) -> list[ChannelT]:
        """Close the pool, and return all its channels, which the caller must close."""
        with self._lock:
            self._closed = True
            return [self._current, *self._old]

    def check_open(self) -> None:
        """Raise CancelledRequestError (CLIENT_CLOSED) if `take_all` was called."""
        if self._closed:
            raise CancelledRequestError("the client was closed", reason="CLIENT_CLOSED")
