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
    """Sends aborts of resumable requests to the router in the background, when a client no longer
    needs their answers."""

    def __init__(self, channels: ChannelPool[grpc.aio.Channel]) -> None:
        self.wanted = PendingRequests()
        self.calls: WeakSet[grpc.aio.UnaryStreamCall[bytes, bytes]] = WeakSet()
        """Calls of the streams that are open. They must be cancelled explicitly, because closing a
        channel may not end them."""
        self._channels = channels
        self._telling: set[asyncio.Future[list[Any]]] = set()

    def send_abort(self, attempts: RequestAttempts) -> asyncio.Future[list[Any]]:
        """Start to send an abort for a request, and return a future that completes when the router
        has answered. Nothing is sent for a request that is not resumable, because such a request
        ends when its call is cancelled."""
        left = self.wanted.remove_request(attempts)
        # A closed client has said so of all of them.
        return self._tell(self._channels.current, left) if left else asyncio.gather()

    async def send_all(self, channel: grpc.aio.Channel) -> None:
        """Abort all pending requests over `channel`. Wait until the router has answered these
        aborts and earlier ones, at most ABORT_TIMEOUT_S seconds for each. Then cancel the calls of
        all streams."""
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
    """Return whether the current asyncio task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def await_answer(
    channels: ChannelPool[grpc.aio.Channel], call: Awaitable[AnswerT]
) -> AnswerT:
    """Await the response of a call and return it. Raises CancelledRequestError if the client was
    closed meanwhile; grpc.aio reports this case like a cancellation of the caller's task."""
    try:
        return await call
    except asyncio.CancelledError:
        if not is_cancelled():
            channels.check_open()
        raise


async def replace_channel(
    channels: ChannelPool[grpc.aio.Channel], channel: grpc.aio.Channel, problem: OutriderError
) -> None:
    """Use a new channel for later calls if `problem` shows that `channel` is broken."""
    old = channels.report_broken(channel, problem)
    if old is not None:
        await old.close()


async def wait_attempt(
    again: RetryDecision, problem: OutriderError, deadline: float | None
) -> bool:
    """Wait before the next attempt, and return whether that attempt resumes the stream.

    Raises `problem` if the deadline would pass during the wait.
    """
    left_s = remaining(deadline, time.monotonic())
    if left_s is not None and again.delay_s >= left_s:
        raise problem
    await asyncio.sleep(again.delay_s)
    return again.resume


async def wait_retry(
    retry: RetryPolicy, attempt: int, problem: OutriderError, deadline: float | None
) -> None:
    """Wait before the next attempt. Raises `problem` if the retry policy or the deadline allows no
    further attempt."""
    delay_s = retry.delay_s(attempt, problem)
    if delay_s is None:
        raise problem
    await wait_attempt(RetryDecision(delay_s, resume=False), problem, deadline)
