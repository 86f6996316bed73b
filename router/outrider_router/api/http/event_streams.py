"""Sends responses to HTTP clients: whole bodies and server-sent events, while the client listens.

A stream begins with its first events, so that earlier errors set the HTTP status. Each write waits
until the client has read the previous output, so a slow reader uses no more memory than over gRPC
(`outrider_router.base.slow_readers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import ResourceExhaustedError
from outrider_router.base.slow_readers import SLOW_READER, with_write_timeout
from outrider_router.requests.service import RouterService

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Without this header, nginx and similar proxies would buffer events.
    (b"x-accel-buffering", b"no"),
]
EventSender = Callable[[str], Awaitable[None]]
"""Function that sends server-sent events, given as their text, to one client."""


class ConnectedResponse(Response):
    """ASGI response that is made while it is sent, and cancelled if the client disconnects."""

    def __init__(self, serve: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        """Create a response. `serve` makes and sends it."""
        super().__init__()
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. Raises errors that occur before the response has begun."""
        await _run_while_connected(receive, self._serve(send))


async def _run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it if the client disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, text: str) -> None:
    """Send a response of status 200 whose body is the JSON `text`."""
    body = text.encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class _EventStream:
    """Sends server-sent events to one client. An empty string ends the response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, events: str) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
            )
        await self._send(
            {"type": "http.response.body", "body": events.encode(), "more_body": bool(events)}
        )


async def send_events(
    service: RouterService,
    send: Send,
    serve: Callable[[EventSender], Awaitable[str]],
    fail: Callable[[Exception], str],
) -> None:
    """Send a stream of server-sent events.

    `serve` sends events and returns the last ones. If it raises an error before it has sent any,
    the error is raised here. `fail` returns the last events after a later error. A client that does
    not read is disconnected.
    """
    stream = _EventStream(send)
    timeout_s = service.config.overload.slow_reader_timeout_s
    try:
        async with with_write_timeout(stream, slow_reader_timeout_s=timeout_s) as write:
            try:
                last = await serve(write)
            except Exception as error:
                if not stream.has_begun:
                    raise
                last = fail(error)
            await write(last)
            await write("")
    except ResourceExhaustedError as error:
        if error.reason != SLOW_READER:
            raise
        # Nothing more can be sent; the server closes the connection.
        service.metrics.refusals.labels(SLOW_READER).inc()
