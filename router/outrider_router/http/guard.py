"""What every HTTP request passes first: the gate, a bound on its body, and the id that it gets."""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.ids import RequestId
from outrider.wire.inference import MAX_NAME_BYTES
from outrider_router.gate import Gate
from outrider_router.http.errors import INVALID, HttpError, describe
from outrider_router.http.request_models import MAX_CHOICES

MAX_BODY_BYTES: Final = 8 << 20
"""A million token ids; what is read of a body may take fifteen times its size."""
OPEN_PATHS: Final = frozenset({"/health", "/ping"})
"""What answers everybody, as health does over gRPC."""
REQUEST_ID: Final = "x-request-id"
OWN_ID: Final = "outrider.own_id"
CLIENT_ID: Final = "outrider.client_id"
CALLER: Final = "outrider.caller"
"""In a request's scope: its ids, and whose API key it shows. Open paths have no caller."""
_MOST = MAX_NAME_BYTES - len(f"-{MAX_CHOICES}")
_VALID = re.compile(rf"[!-~]{{1,{_MOST}}}")
_TOO_LARGE = f"The body is larger than {MAX_BODY_BYTES} bytes."


class Guard:
    """ASGI middleware: turns away callers without an API key, where keys are asked for, before
    anything of a body is read; refuses large bodies, names every request and tells its name.

    An id that a client chose (`X-Request-Id`, printable ASCII) is what the router knows its request
    by; any other one is made here.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        chosen = headers.get(REQUEST_ID, "")
        client_id = RequestId(chosen) if _VALID.fullmatch(chosen) else None
        own_id = client_id or RequestId(f"req-{secrets.token_hex(8)}")
        scope[CLIENT_ID], scope[OWN_ID] = client_id, own_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = own_id
            await send(message)

        if scope["path"] not in OPEN_PATHS:
            try:
                scope[CALLER] = self._gate.authorize(headers.get("authorization"))
            except OutriderError as refused:
                answer = describe(refused).response({"connection": "close"})
                await answer(scope, receive, named)
                return
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            error = HttpError(status=413, type=INVALID, message=_TOO_LARGE, code="body_too_large")
            await error.response({"connection": "close"})(scope, receive, named)
            return
        await self._app(scope, _Bounded(receive), named)


class _Bounded:
    """`receive` of a body that did not say how long it is."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = MAX_BODY_BYTES

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, _TOO_LARGE)
        return message
