"""HTTP connections of one server: how long each may take to say something, and how many there are.

uvicorn leaves a connection alone that has not said what it wants. Here a head and a body have to
come in time, and where there is no room for one more connection the one that was idle longest makes
it: those that wait for an answer never do. Where none is idle the new one hears 503.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import ClassVar, Final, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider_router.http.errors import HttpError

MAX_CONNECTIONS: Final = 4096
HEAD_S: Final = 10.0
"""Time from the first moment of a connection, or the first byte of a further request, until the
head of the request is there."""
BODY_S: Final = 60.0
"""Time until the body is there, from then on: eight megabytes over a slow line."""
KEEP_ALIVE_S: Final = 75
"""Time that a connection is kept between two requests: longer than load balancers keep theirs, so
that none sends a request into a connection that is just being closed."""
REFUSAL_S: Final = 1.0
"""Time that a connection without room gets to ask, so that it hears why."""
MAX_REFUSALS: Final = 256
"""Connections at once that get it; those beyond are closed at once."""
CONNECTIONS_EXHAUSTED: Final = "CONNECTIONS_EXHAUSTED"
_FULL: Final = HttpError(
    status=503,
    type="service_unavailable_error",
    message="As many connections as there may be are waiting for answers.",
    code=CONNECTIONS_EXHAUSTED.lower(),
    retry_after_s=1.0,
)


def most_connections() -> int:
    """The bound on connections: half of the files that the process may have open, if these are few,
    for the other half is for gRPC and the rest of the process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files < 0 else min(MAX_CONNECTIONS, files // 2)


class Places:
    """The connections of one server that have a place, and which of them are idle."""

    def __init__(self, most: int, on_refused: Callable[[], None]) -> None:
        """`on_refused` hears of each connection that finds no place."""
        self._most = most
        self._on_refused = on_refused
        self._held: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """In the order in which they became idle."""
        self.refused = 0
        """Connections without a place that are about to hear so."""

    def take(self, connection: Connection) -> bool:
        """Give a new connection a place, if need be that of an idle one; whether it has one."""
        if len(self._held) >= self._most:
            oldest = next((held for held in self._idle if held.is_sent), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.cut()
        self._held.add(connection)
        self._idle[connection] = None
        return True

    def refuse(self) -> bool:
        """Count one that has no place; whether it may be told so."""
        self._on_refused()
        if self.refused >= MAX_REFUSALS:
            return False
        self.refused += 1
        return True

    def leave(self, connection: Connection) -> None:
        """It is closed. Idempotent."""
        self._held.discard(connection)
        self._idle.pop(connection, None)

    def busy(self, connection: Connection) -> None:
        """It has asked for something."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """It has its answer."""
        if connection in self._held:
            self._idle[connection] = None


class Connection(H11Protocol):
    """One connection; `connections_of` makes the class of a server's."""

    places: ClassVar[Places]
    _timer: asyncio.TimerHandle | None = None
    """Ends it where what `_waits_for` says does not come in time."""
    _waits_for: Literal["", "head", "body"] = ""
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or be refused."""
        super().connection_made(transport)
        if self.places.take(self):
            self._wait_for("head", HEAD_S)
        elif self.places.refuse():
            self._refused = True
            self._wait_for("head", REFUSAL_S)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        super().connection_lost(exc)
        self._wait_for("", 0.0)
        self.places.leave(self)
        if self._refused:
            self._refused = False
            self.places.refused -= 1

    def data_received(self, data: bytes) -> None:
        """Take what was sent, and see what is still to come."""
        if self._refused:
            self._tell_refusal()
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._wait_for("head", HEAD_S)
            else:
                # The rest of a body whose answer did not need it: uvicorn forgot its own timer.
                self.places.idle(self)
                self._wait_for("head", KEEP_ALIVE_S)
        else:
            self.places.busy(self)
            self._wait_for_body()

    def on_response_complete(self) -> None:
        """Idle again, unless the next request has come already or the body has still to come."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            # uvicorn's own timer ends it if nothing comes.
            self._wait_for("", 0.0)
            self.places.idle(self)
        else:
            self._wait_for_body()

    @property
    def is_sent(self) -> bool:
        """Whether all that was answered is on its way: a slow reader's answer may wait here."""
        return self.transport.get_write_buffer_size() == 0

    def cut(self) -> None:
        """End it now."""
        self.transport.abort()

    def _wait_for_body(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body", BODY_S)
        else:
            self._wait_for("", 0.0)

    def _wait_for(self, what: Literal["", "head", "body"], seconds: float) -> None:
        """What is to come within so many seconds; time runs on for what it waits for already."""
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.cut) if what else None

    def _tell_refusal(self) -> None:
        if self.transport.is_closing():
            return
        headers = {
            "content-type": "application/json",
            "content-length": str(len(_FULL.body)),
            "connection": "close",
            **_FULL.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        text = f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n{_FULL.body}"
        self.transport.write(text.encode())
        self.transport.close()


def connections_of(places: Places) -> type[Connection]:
    """The class of the connections that share these places."""
    return type("Connection", (Connection,), {"places": places})
