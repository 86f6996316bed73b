"""Call helpers of the asynchronous client: channel replacement, retry waits and aborts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar
from weakref import WeakSet

import grpc

from outrider.client.attempts import RequestAttempts, RetryDecision
from outrider.client.channels import ChannelPool
from outrider.client.pending_requests import PendingRequests
from outrider.client.retry import RetryPolicy, remaining
from outrider.client.rpcs import ABORT, ABORT_TIMEOUT_S, Metadata
from outrider.errors import OutriderError
from outrider.ids import RequestId

AnswerT = TypeVar("AnswerT")


class AbortSender:
    """Tells the router in the background to abort resumable requests that nobody wants any more."""

    def __init__(self, channels: ChannelPool[grpc.aio.Channel]) -> None:
        self.wanted = PendingRequests()
        self.calls: WeakSet[grpc.aio.UnaryStreamCall[bytes, bytes]] = WeakSet()
        """Calls of the open streams. They are cancelled explicitly, because closing a channel may
        not end them."""
        self._channels = channels
        self._telling: set[asyncio.Future[list[Any]]] = set()

    def send_abort(self, attempts: RequestAttempts) -> asyncio.Future[list[Any]]:
        """Send an abort for a request. Requests that are not resumable end with their calls."""
        left = self.wanted.remove_request(attempts)
        # A closed client has said so of all of them.
        return self._tell(self._channels.current, left) if left else asyncio.gather()

    async def send_all(self, channel: grpc.aio.Channel) -> None:
        """Send all pending aborts, wait within a bound until the router has received these and
        earlier ones, then cancel the calls of streams."""
        self._tell(channel, self.wanted.take_all())
        await asyncio.gather(*self._telling, return_exceptions=True)
        for call in list(self.calls):
            call.cancel()

    def _tell(
        self, channel: grpc.aio.Channel, left: Mapping[Metadata, list[RequestId]]
    ) -> asyncio.Future[list[Any]]:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ABORT.path)
        calls = (
            method(ABORT.encode(ids), timeout=ABORT_TIMEOUT_S, metadata=metadata)
            for metadata, ids in left.items()
        )
        # A router that does not hear of them finds out within its grace time.
        telling = asyncio.gather(*calls, return_exceptions=True)
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        return telling


def is_cancelled() -> bool:
    """Return whether the running task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def await_answer(
    channels: ChannelPool[grpc.aio.Channel], call: Awaitable[AnswerT]
) -> AnswerT:
    """Await the response of a call. Raises CancelledRequestError if the client was closed
    meanwhile, which grpc.aio reports as a cancellation by the caller."""
    try:
        return await call
    except asyncio.CancelledError:
        if not is_cancelled():
            channels.check_open()
        raise


async def replace_channel(
    channels: ChannelPool[grpc.aio.Channel], channel: grpc.aio.Channel, problem: OutriderError
) -> None:
    """Replace the channel of later calls if this one broke."""
    old = channels.report_broken(channel, problem)
    if old is not None:
        await old.close()


async def wait_attempt(
    again: RetryDecision, problem: OutriderError, deadline: float | None
) -> bool:
    """Wait before the next attempt and return whether it resumes the stream.

    Raises `problem` if the deadline would pass first.
    """
    left_s = remaining(deadline, time.monotonic())
    if left_s is not None and again.delay_s >= left_s:
        raise problem
    await asyncio.sleep(again.delay_s)
    return again.resume


async def wait_retry(
    retry: RetryPolicy, attempt: int, problem: OutriderError, deadline: float | None
) -> None:
    """Wait before the next attempt. Raises `problem` if there must be none."""
    delay_s = retry.delay_s(attempt, problem)
    if delay_s is None:
        raise problem
    await wait_attempt(RetryDecision(delay_s, resume=False), problem, deadline)
