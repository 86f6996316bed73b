"""ASGI middleware of every HTTP request: access control, body size limit and request id."""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.ids import RequestId
from outrider.wire.inference import MAX_NAME_BYTES
from outrider_router.admission.access_control import AccessControl
from outrider_router.admission.queue import ArrivalQueue
from outrider_router.api.http.errors import (
    ASKED,
    INVALID,
    MAX_QUOTED_CHARS,
    HttpError,
    describe_error,
)
from outrider_router.api.http.request_models import MAX_CHOICES
from outrider_router.config import HttpConfig

PUBLIC_PATHS: Final = frozenset({"/health", "/ping"})
"""Paths that need no API key, like the health service of gRPC."""
REQUEST_ID: Final = "x-request-id"
OWN_ID: Final = "outrider.own_id"
CLIENT_ID: Final = "outrider.client_id"
CALLER: Final = "outrider.caller"
"""Key in a request's ASGI scope. Its value is the caller; requests of public paths have none. The
value of `OWN_ID` is the request id in use, and that of `CLIENT_ID` is the id that the client chose,
or None.
"""
_MAX = MAX_NAME_BYTES - len(f"-{MAX_CHOICES}")
_VALID = re.compile(rf"[!-~]{{1,{_MAX}}}")


def asks_for_open_path(first: bytes, root_path: str) -> bool:
    """Return whether a connection begins with a request for a path that needs no API key. `first`
    are the first bytes of the connection. With TLS they are encrypted, so the result is False.
    """
    method, _, rest = first.partition(b" ")
    path = re.split(rb"[ ?]", rest, maxsplit=1)[0].decode("latin-1")
    return method in (b"GET", b"HEAD") and path.removeprefix(root_path) in PUBLIC_PATHS


class RequestMiddleware:
    """ASGI middleware that checks access, limits bodies and assigns request ids.

    If API keys are required, it refuses callers without a valid key before their body is read. It
    refuses bodies that are too large or have a Content-Encoding. Every request gets an id, which
    the response returns: the client's `X-Request-Id` if it is printable ASCII and not too long,
    otherwise a generated one.
    """

    def __init__(
        self,
        app: ASGIApp,
        access_control: AccessControl,
        options: HttpConfig,
        arrivals: ArrivalQueue,
    ) -> None:
        self._app = app
        self._access_control = access_control
        self._arrivals = arrivals
        self._max_body_bytes = options.max_body_bytes
        self._root_path = options.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ASKED] = f"{scope['method']} {scope['path'][:MAX_QUOTED_CHARS]}"
        self._strip_root_path(scope)
        is_head = scope["method"] == "HEAD"
        headers = Headers(scope=scope)
        chosen = headers.get(REQUEST_ID, "")
        client_id = RequestId(chosen) if _VALID.fullmatch(chosen) else None
        own_id = client_id or RequestId(f"req-{secrets.token_hex(8)}")
        scope[CLIENT_ID], scope[OWN_ID] = client_id, own_id
        # Proxies may disagree on where such a request ends, so the connection is closed after it.
        is_ambiguous = "transfer-encoding" in headers and "content-length" in headers

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                told[REQUEST_ID] = own_id
                if is_ambiguous:
                    told["connection"] = "close"
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            if scope["path"] not in PUBLIC_PATHS:
                scope[CALLER] = self._access_control.authorize(headers.get("authorization"))
        except OutriderError as error:
            refusal: HttpError | None = describe_error(error)
        else:
            refusal = self._refusal(headers)
        if refusal is not None:
            await refusal.response({"connection": "close"})(scope, receive, named)
            return
        if self._root_path and scope["path"] == self._root_path:
            # The page at "/" loads its files by relative paths.
            await RedirectResponse(f"{self._root_path}/")(scope, receive, named)
            return
        if scope["path"] not in PUBLIC_PATHS:
            await self._arrivals.wait_turn()
        # HEAD is served where GET is. The scope is copied, because the server needs its method.
        routed = {**scope, "method": "GET"} if is_head else scope
        await self._app(routed, _BoundedBody(receive, self._max_body_bytes), named)

    def _strip_root_path(self, scope: Scope) -> None:
        """Remove the configured path prefix of all routes from a request's path."""
        path: str = scope["path"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            scope["path"] = path[len(self._root_path) :]
            scope["raw_path"] = scope["raw_path"][len(self._root_path) :]

    def _refusal(self, headers: Headers) -> HttpError | None:
        """Return the error for which a body is refused by its headers, or None."""
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            return HttpError(
                status=415,
                type=INVALID,
                message=f"Content-Encoding {encoding[:MAX_QUOTED_CHARS]!r} is not decoded here; "
                "send the body as it is, without this header",
                code="unsupported_media_type",
                headers_added={"accept-encoding": "identity"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return HttpError(
                status=413,
                type=INVALID,
                message=_too_large(self._max_body_bytes),
                code="body_too_large",
            )
        return None


class _BoundedBody:
    """ASGI `receive` with a size limit, for bodies without a Content-Length."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = self._left = max_bytes

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, _too_large(self._max_bytes))
        return message


def _too_large(max_bytes: int) -> str:
    return f"The body is larger than {max_bytes} bytes."
