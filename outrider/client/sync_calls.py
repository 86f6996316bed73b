"""Call helpers of the synchronous client: channel replacement, retry waits and aborts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import grpc

from outrider.client.attempts import RetryDecision
from outrider.client.channels import ChannelPool
from outrider.client.retry import RetryPolicy, remaining
from outrider.client.rpcs import ABORT, ABORT_TIMEOUT_S, Metadata
from outrider.errors import CancelledRequestError, OutriderError
from outrider.ids import RequestId


def send_abort(
    channels: ChannelPool[grpc.Channel], left: Mapping[Metadata, list[RequestId]]
) -> None:
    """Tell the router of a resumable request that nobody wants; others end with their calls."""
    # A closed client has said so of all of them.
    with contextlib.suppress(CancelledRequestError), convert_call_errors(channels):
        send_aborts(channels.current, left)


def send_aborts(channel: grpc.Channel, left: Mapping[Metadata, list[RequestId]]) -> None:
    """The same of several, side by side."""
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ABORT.path)
    told = [
        method.future(ABORT.encode(ids), timeout=ABORT_TIMEOUT_S, metadata=metadata)
        for metadata, ids in left.items()
    ]
    for answer in told:
        # A router that does not hear of them finds out within its grace time.
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            answer.result()


@contextlib.contextmanager
def convert_call_errors(channels: ChannelPool[grpc.Channel]) -> Iterator[None]:
    """Around a call. Raises CancelledRequestError where the client is closed meanwhile: grpc has a
    ValueError for a closed channel."""
    try:
        yield
    except ValueError:
        channels.check_open()
        raise


def replace_channel(
    channels: ChannelPool[grpc.Channel], channel: grpc.Channel, problem: OutriderError
) -> None:
    """Have calls go by a new channel if this one broke."""
    old = channels.report_broken(channel, problem)
    if old is not None:
        old.close()


def wait_attempt(again: RetryDecision, problem: OutriderError, deadline: float | None) -> bool:
    """Wait before the next attempt, and say whether it resumes; `problem` if it is too late."""
    left_s = remaining(deadline, time.monotonic())
    if left_s is not None and again.delay_s >= left_s:
        raise problem
    time.sleep(again.delay_s)
    return again.resume


def wait_retry(
    retry: RetryPolicy, attempt: int, problem: OutriderError, deadline: float | None
) -> None:
    """Wait before the next attempt; raises `problem` if there is to be none."""
    delay_s = retry.delay_s(attempt, problem)
    if delay_s is None:
        raise problem
    wait_attempt(RetryDecision(delay_s, resume=False), problem, deadline)
