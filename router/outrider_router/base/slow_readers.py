"""Write timeout of response streams: disconnects clients that stop reading.

A gRPC write waits until the client's flow-control window has space for the previous messages. So a
client that stops reading occupies at most one message and the transport's buffer in this process,
plus the token ids of its output, which are limited. Streams of other clients are not delayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from outrider.errors import ResourceExhaustedError

EventT = TypeVar("EventT")

SLOW_READER = "SLOW_READER"
"""Reason of the error that ends a stream whose client stopped reading."""


class _TimedWriter(Generic[EventT]):
    """Ends a stream when one write takes too long. Has one timer per stream, not one per
    message.
    """

    def __init__(
        self,
        write: Callable[[EventT], Awaitable[None]],
        limit: asyncio.Timeout,
        timeout_s: float,
    ) -> None:
        self._write, self._limit, self._timeout_s = write, limit, timeout_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        """Time of the event loop's clock since which a write waits, in seconds; None while no write
        waits.
        """
        self._timer = self._loop.call_later(timeout_s, self._look)

    async def __call__(self, event: EventT) -> None:
        self._since = self._loop.time()
        await self._write(event)
        self._since = None

    def stop(self) -> None:
        """Stop the timer because the stream ended."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        end = self._timeout_s + (now if self._since is None else self._since)
        if now >= end:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(end, self._look)


@asynccontextmanager
async def with_write_timeout(
    write: Callable[[EventT], Awaitable[None]], *, slow_reader_timeout_s: float
) -> AsyncGenerator[Callable[[EventT], Awaitable[None]], None]:
    """Yield a function that calls `write` with a timeout, for the duration of an `async with`
    block. Any task may call the function.

    The block ends with ResourceExhaustedError (SLOW_READER) once a write has waited for
    `slow_reader_timeout_s` seconds.
    """
    limit = asyncio.timeout(None)
    try:
        async with limit:
            writer = _TimedWriter(write, limit, slow_reader_timeout_s)
            try:
                yield writer
            finally:
                writer.stop()
    except TimeoutError:
        if not limit.expired():
            raise
        raise ResourceExhaustedError(
            f"the client read nothing for {slow_reader_timeout_s:g} s although output was waiting",
            reason=SLOW_READER,
        ) from None
