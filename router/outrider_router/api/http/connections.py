"""HTTP/1.1 connections: timeouts for head and body, bounded parsing, eviction at the limit.

uvicorn waits without a time limit for a client that has not sent its request. Here head and body
must arrive in time. At the connection limit a new connection evicts the one that was idle longest,
but never one with a request in progress. If no connection is idle, the new one gets status 503.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider_router.api.http.acceptor import REFUSAL_TIMEOUT_S, AcceptedConnection
from outrider_router.api.http.connection_slots import CONNECTIONS_EXHAUSTED
from outrider_router.api.http.errors import INVALID, HttpError
from outrider_router.config import HttpConfig

SMALL_CHUNK_BYTES: Final = 1024
_FULL: Final = HttpError(
    status=503,
    type="service_unavailable_error",
    message="The maximum number of HTTP connections is in use.",
    code=CONNECTIONS_EXHAUSTED.lower(),
    retry_after_s=1.0,
)
_PHRASES: Final = {400: "Bad Request", 503: "Service Unavailable"}


class _BoundedParser(h11.Connection):
    """h11's parser with a limit on small chunks, because each of them takes as long to parse as a
    large one.
    """

    def __init__(self, max_small_chunks: int) -> None:
        super().__init__(h11.SERVER)
        self._max_small_chunks = max_small_chunks
        self._small_chunks = 0
        self.problem = "The request is not HTTP/1.1."
        """Error message for a request with which parsing raised RemoteProtocolError."""

    def next_event(self) -> Any:
        """Return the next event of the peer. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._small_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start and event.chunk_end:
            self._small_chunks += len(event.data) < SMALL_CHUNK_BYTES
            if self._small_chunks > self._max_small_chunks:
                self.problem = (
                    f"The body has more than {self._max_small_chunks} chunks of less than "
                    f"{SMALL_CHUNK_BYTES} bytes; send larger chunks, or a Content-Length."
                )
                raise h11.RemoteProtocolError(self.problem)
        return event


class HttpConnection(H11Protocol):
    """HTTP protocol of one connection, with time limits and a slot."""

    def __init__(self, accepted: AcceptedConnection, options: HttpConfig, **kwargs: Any) -> None:
        """Create the protocol of a connection. `accepted` holds its slot, and `kwargs` are
        uvicorn's arguments for a protocol.
        """
        super().__init__(**kwargs)
        self.accepted = accepted
        self.options = options
        self._timer: asyncio.TimerHandle | None = None
        """Timer that closes the connection if the part of a request named by `_waits_for` does not
        arrive in time.
        """
        self._waits_for: Literal["", "head", "body"] = ""
        self._parser = _BoundedParser(self.options.max_small_chunks)
        self.conn = self._parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for a request."""
        super().connection_made(transport)
        self.accepted.begin_serving(self)
        self._wait_for(
            "head", REFUSAL_TIMEOUT_S if self.accepted.is_refused else self.options.head_s
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the slot."""
        super().connection_lost(exc)
        self._wait_for("", 0.0)
        self.accepted.release_slot()

    def data_received(self, data: bytes) -> None:
        """Parse received data and update the time limits."""
        if self.accepted.is_refused:
            self._tell(_FULL)
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._wait_for("head", self.options.head_s)
            else:
                # The rest of a body arrived after the response, and uvicorn has stopped its own
                # timer.
                self.accepted.mark_idle()
                self._wait_for("head", self.options.keep_alive_s)
        else:
            self.accepted.mark_busy()
            self._wait_for_body()

    def on_response_complete(self) -> None:
        """Mark the connection as idle, unless the next request has arrived or the rest of the body
        is missing.
        """
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            # uvicorn's own timer closes the connection if no request comes.
            self._wait_for("", 0.0)
            self.accepted.mark_idle()
        else:
            self._wait_for_body()

    @property
    def is_sent(self) -> bool:
        """Whether all output has been passed to the operating system. If the client reads slowly,
        output may still be in the write buffer of this process.
        """
        return self.transport.get_write_buffer_size() == 0

    def close_now(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _wait_for_body(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body", self.options.body_s)
        else:
            self._wait_for("", 0.0)

    def _wait_for(self, what: Literal["", "head", "body"], seconds: float) -> None:
        """Start the timer for a part of a request that must arrive within `seconds`. A timer for
        the same part continues. "" stops the timer.
        """
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.close_now) if what else None

    def send_400_response(self, msg: str) -> None:
        """Send the error of a request that cannot be parsed, unless a response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # Sent without the parser, which cannot send a response in its error state.
            self._tell(
                HttpError(
                    status=400, type=INVALID, message=self._parser.problem, code="invalid_request"
                )
            )
        else:
            self.close_now()

    def _tell(self, error: HttpError) -> None:
        """Send an error and close the connection."""
        if self.transport.is_closing():
            return
        headers = {
            "content-type": "application/json",
            "content-length": str(len(error.body)),
            "connection": "close",
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        text = f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n{head}\r\n{error.body}"
        self.transport.write(text.encode())
        self.transport.close()
