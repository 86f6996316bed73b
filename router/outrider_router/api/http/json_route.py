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
from starlette.requests import Request
from starlette.responses import Response

from outrider_router.api.http.errors import BodyError

LARGE_BYTES: Final = 1 << 16
"""Size in bytes above which bodies are parsed one at a time."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MAX_QUOTES: Final = 1 << 16
_VALUES: Final = b",[{"
"""Characters that are counted to count JSON values: every value except the first follows one of
them."""
MAX_LEVELS: Final = 200
"""Nesting depth up to which pydantic's parser reads every document."""
_MAX_SEARCHED_BYTES: Final = 1 << 17
"""Size in bytes of the part of a body in which the field at fault is looked for. This takes at most
some 30 ms."""
_MAX_FIELD_BYTES: Final = 64
"""Size in bytes at which the name of the field at fault is cut."""
_TOKEN: Final = re.compile(_STRING.pattern + rb"|[\[\]{},:]", re.DOTALL)
_PLACE: Final = re.compile(r" at line (\d+) column (\d+)$")
"""Place that pydantic's parser names at the end of its messages."""


class JsonParser:
    """Parses the request bodies of one server."""

    def __init__(self, max_values: int) -> None:
        """Create a parser that refuses bodies with more than `max_values` values."""
        self._max_values = max_values
        self._lock = asyncio.Lock()

    async def parse(self, body: bytes) -> Any:
        """Parse a body. Raises BodyError for invalid JSON and for too many values."""
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
            raise BodyError(
                f"The body has more than {self._max_values} JSON values; send fewer token ids or "
                "fields in one request.",
            )
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise _parse_error(body, str(error)) from None

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


def _parse_error(body: bytes, why: str) -> BodyError:
    """Return the error for a body that the parser refused with this message."""
    place = _PLACE.search(why)
    field = "" if place is None else find_field(body, line=int(place[1]), column=int(place[2]))
    if why.startswith("recursion limit"):
        return BodyError(f"The body may be nested at most {MAX_LEVELS} levels deep: {why}", field)
    return BodyError(f"The body is not JSON: {why}", field)


def find_field(body: bytes, *, line: int, column: int) -> str:
    """Return the field of a body's object in whose value a line and a column are, both counted
    from 1, the latter in bytes. The name is cut at `_MAX_FIELD_BYTES`. Return "" if they are in no
    value, or behind the first `_MAX_SEARCHED_BYTES`."""
    start = 0
    for _ in range(line - 1):
        start = body.find(b"\n", start, _MAX_SEARCHED_BYTES) + 1
        if not start:
            return ""
    end = start + column - 1
    if end > _MAX_SEARCHED_BYTES:
        return ""
    depth, text, field = 0, b"", b""
    for token in _TOKEN.finditer(body, 0, end):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
            field = field if depth else b""
        elif depth != 1:
            continue
        elif mark == b",":
            field = b""
        elif mark == b":":
            field = text
        else:
            text = mark
    return field[1:-1][:_MAX_FIELD_BYTES].decode(errors="replace")


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
