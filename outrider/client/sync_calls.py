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
    """Tell the router to abort the resumable requests in `left`, which are grouped by their
    metadata. Other requests need no abort, because they end when their calls are cancelled."""
    # A closed client has already aborted all its requests.
    with contextlib.suppress(CancelledRequestError), convert_call_errors(channels):
        send_aborts(channels.current, left)


def send_aborts(channel: grpc.Channel, left: Mapping[Metadata, list[RequestId]]) -> None:
    """Send one Abort call on `channel` for each group of requests, all at the same time, and wait
    for the answers. Errors are ignored."""
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ABORT.path)
    told = [
        method.future(ABORT.encode(ids), timeout=ABORT_TIMEOUT_S, metadata=metadata)
        for metadata, ids in left.items()
    ]
    for answer in told:
        # If an abort is lost, the router ends the requests after its grace time.
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            answer.result()


@contextlib.contextmanager
def convert_call_errors(channels: ChannelPool[grpc.Channel]) -> Iterator[None]:
    """Convert errors of the calls in a `with` block: if the client was closed meanwhile, raise
    CancelledRequestError instead of gRPC's ValueError."""
    try:
        yield
    except ValueError:
        channels.check_open()
        raise


def replace_channel(
    channels: ChannelPool[grpc.Channel], channel: grpc.Channel, problem: OutriderError
) -> None:
    """Use a new channel for later calls if `problem` shows that `channel` is broken."""
    old = channels.report_broken(channel, problem)
    if old is not None:
        old.close()


def wait_attempt(again: RetryDecision, problem: OutriderError, deadline: float | None) -> bool:
    """Wait for the delay before the next attempt, and return whether that attempt resumes the
    stream. Raises `problem` if the deadline would pass during the wait."""
    left_s = remaining(deadline, time.monotonic())
    if left_s is not None and again.delay_s >= left_s:
        raise problem
    time.sleep(again.delay_s)
    return again.resume


def wait_retry(
    retry: RetryPolicy, attempt: int, problem: OutriderError, deadline: float | None
) -> None:
    """Wait before the next attempt. Raises `problem` if the retry policy or the deadline allows no
    further attempt."""
    delay_s = retry.delay_s(attempt, problem)
    if delay_s is None:
        raise problem
    wait_attempt(RetryDecision(delay_s, resume=False), problem, deadline)
