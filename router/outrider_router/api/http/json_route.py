"""Route class for JSON bodies: pydantic's parser, bounded in depth and in number of values.

pydantic parses faster than the standard library. Parsing holds the interpreter lock, so a thread
would not keep it from blocking the event loop. Large bodies are parsed one at a time instead, with
a pause after each in which streams continue.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

LARGE_BYTES: Final = 1 << 16
"""Size in bytes from which bodies are parsed one at a time."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MAX_QUOTES: Final = 1 << 16
_VALUES: Final = b",[{"
"""Every value but the first one of a document has one of these before it."""


class JsonParser:
    """Parses the request bodies of one server."""

    def __init__(self, max_values: int) -> None:
        """`max_values` bounds the values of a body."""
        self._max_values = max_values
        self._lock = asyncio.Lock()

    async def parse(self, body: bytes) -> Any:
        """Parse a body. Raises HTTPException (400) for invalid JSON and for too many values."""
        if len(body) <= LARGE_BYTES:
            return self._parse(body)
        async with self._lock:
            begun = time.monotonic()
            try:
                return self._parse(body)
            finally:
                await asyncio.sleep(time.monotonic() - begun)

    def _parse(self, body: bytes) -> Any:
        if len(body) > self._max_values and self._has_too_many(body):
            raise HTTPException(
                400,
                f"The body has more than {self._max_values} JSON values; send fewer token ids or "
                "fields in one request.",
            )
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"The body is not JSON: {error}") from None

    def _has_too_many(self, body: bytes) -> bool:
        """Whether a body has more values than it may; counts, and parses nothing."""
        if _count(body) <= self._max_values:
            return False
        quotes = body.count(b'"') - body.count(b'\\"')
        # Commas of texts counted, too. Leaving out many texts would take as long as parsing.
        return quotes > _MAX_QUOTES or _count(_STRING.sub(b"", body)) > self._max_values


def _count(body: bytes) -> int:
    """A bound on the values of a document, if it had no texts."""
    return 1 + sum(body.count(mark) for mark in _VALUES)


class _JsonRequest(Request):
    async def json(self) -> Any:
        parser: JsonParser = self.app.state.json_parser
        return await parser.parse(await self.body())


class JsonRoute(APIRoute):
    """Route whose JSON body is parsed by `JsonParser`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the framework's handler, with requests that use `JsonParser`."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler
