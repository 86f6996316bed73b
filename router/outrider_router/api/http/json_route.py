"""Route class for JSON bodies: pydantic's parser, bounded in depth and in number of values.

pydantic parses faster than the standard library. Parsing holds the interpreter lock, so it would
block the event loop even in a thread. Instead, large bodies are parsed one at a time, with a pause
after each in which streams continue.
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
"""Size in bytes above which bodies are parsed one at a time."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MAX_QUOTES: Final = 1 << 16
_VALUES: Final = b",[{"
"""Characters that are counted to count JSON values: every value except the first follows one of
them."""


class JsonParser:
    """Parses the request bodies of one server."""

    def __init__(self, max_values: int) -> None:
        """Create a parser that refuses bodies with more than `max_values` values."""
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
        """Return whether a body has too many values, by counting characters without parsing."""
        if _count(body) <= self._max_values:
            return False
        quotes = body.count(b'"') - body.count(b'\\"')
        # The count included commas in strings. Removing very many strings takes as long as parsing.
        return quotes > _MAX_QUOTES or _count(_STRING.sub(b"", body)) > self._max_values


def _count(body: bytes) -> int:
    """Return an upper bound of the number of values in a document without strings."""
    return 1 + sum(body.count(mark) for mark in _VALUES)


class _JsonRequest(Request):
    async def json(self) -> Any:
        parser: JsonParser = self.app.state.json_parser
        return await parser.parse(await self.body())


class JsonRoute(APIRoute):
    """Route whose JSON body is parsed by `JsonParser`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler of the route. It gets requests whose body is parsed by
        `JsonParser`."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handler
