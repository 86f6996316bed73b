"""What the asynchronous client does around its calls: new channels, waiting, farewells."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc

from outrider.client.calls import ABORT, ABORT_TIMEOUT_S, Metadata
from outrider.client.channels import Channels
from outrider.client.resuming import Again
from outrider.client.retry import RetryPolicy, remaining
from outrider.errors import OutriderError
from outrider.wire.inference import GenerateRequest


class Farewells:
    """Tells the router of resumable requests that nobody wants any more, in the background."""

    def __init__(self, channels: Channels[grpc.aio.Channel], metadata: Metadata) -> None:
        self._channels = channels
        self._metadata = metadata
        self._tasks: set[asyncio.Future[None]] = set()

    def say(self, request: GenerateRequest) -> asyncio.Future[None]:
        """Have a request aborted; other requests end with their calls."""
        task: asyncio.Future[None] = asyncio.ensure_future(self._abort(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def said(self) -> None:
        """Wait until all were told, within a bound."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _abort(self, request: GenerateRequest) -> None:
        if not request.resumable or request.request_id is None:
            return
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        method = self._channels.current.unary_unary(ABORT.path)
        # A router that does not hear of it finds out within its grace time.
        with contextlib.suppress(grpc.aio.AioRpcError):
            data = ABORT.encode([request.request_id])
            await method(data, timeout=ABORT_TIMEOUT_S, metadata=self._metadata)


async def replace(
    channels: Channels[grpc.aio.Channel], channel: grpc.aio.Channel, problem: OutriderError
) -> None:
    """Have calls go by a new channel if this one broke."""
    old = channels.broke(channel, problem)
    if old is not None:
        await old.close()


async def wait(again: Again, problem: OutriderError, deadline: float | None) -> bool:
    """Wait before the next attempt, and say whether it resumes; `problem` if it is too late."""
    left_s = remaining(deadline, time.monotonic())
    if left_s is not None and again.delay_s >= left_s:
        raise problem
    await asyncio.sleep(again.delay_s)
    return again.resume


async def pause(
    retry: RetryPolicy, attempt: int, problem: OutriderError, deadline: float | None
) -> None:
    """Wait before the next attempt; raises `problem` if there is to be none."""
    delay_s = retry.delay_s(attempt, problem)
    if delay_s is None:
        raise problem
    await wait(Again(delay_s, resume=False), problem, deadline)
