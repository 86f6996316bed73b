"""Decides after each failed attempt of a request whether to retry it, resume its stream, or give
up.

Pure: a decision depends on the error, the part of the answer received so far, and the time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.client.retry import RetryPolicy
from outrider.errors import (
    AlreadyExistsError,
    ConnectionLostError,
    NotFoundError,
    OutriderError,
)

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.25
"""Maximum pause between two attempts to resume a stream, in seconds. It is short because a user
waits for the stream."""
MAX_ROUTER_LOOKUPS = 32
"""Maximum number of connections that a client opens to find the router that has its stream, if
several routers share an address.

The probability that none of 32 connections reaches the right router is 1/10,000 with four routers,
and 1/70 with eight.
"""
SHUTDOWN = "SHUTDOWN"
"""Error reason of a router that shuts down. The router may soon be back. If it has a journal, its
requests continue then."""
ROUTER_UNREACHABLE = "ROUTER_UNREACHABLE"
"""Error reason of a router that does not have a request, if another router of the fleet does not
answer and may have it. That router may soon be back."""


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Decision to make another attempt after `delay_s` seconds. If `resume` is True, the attempt
    continues the stream after the events received so far; else it sends the request again."""

    delay_s: float
    resume: bool
    needs_new_id: bool = False
    """Whether the request must get a new id, because it may still run on a router that is
    unreachable. If both had the same id, the stream could later be resumed with the answer of the
    wrong one."""


class RequestAttempts:
    """Decides about further attempts of one request.

    A request that the router did not admit is sent again as the retry policy says. If the
    connection broke before the client knew whether the request was admitted, the client first tries
    to resume its stream, because the request may have arrived. If the connection breaks after the
    request was admitted, the client tries to resume the stream.
    """

    def __init__(self, retry: RetryPolicy, *, resumable: bool) -> None:
        self._retry = retry
        self._resumable = resumable
        self._openings = 1
        self._probing = False
        """Whether the next attempt only tests if the request arrived: it tries to resume the stream
        of an attempt whose connection broke."""
        self._pauses = 0
        self._looks = 0
        """Number of attempts, since the last received message, that reached a router without the
        stream although another router at the same address may have it."""
        self._broke: OutriderError | None = None
        self._broke_at = 0.0

    def record_message(self) -> None:
        """Record that a message was received. The connection works, so earlier failures no longer
        count."""
        self._broke = None
        self._probing = False
        self._pauses = self._looks = 0

    def decide_after(
        self, error: OutriderError, *, now: float, informed: bool = False, told: bool = False
    ) -> RetryDecision:
        """Return what to do after a failed attempt. Raises `error` if no further attempt must be
        made.

        `informed` is whether the client knows that the request was admitted, and `told` is whether
        it has received a part of the answer. `now` is the time in seconds of a monotonic clock.
        """
        broken = self._resumable and _is_break(error)
        if broken and informed:
            return self._resume(error, now)
        if is_elsewhere(error) and self._looks < MAX_ROUTER_LOOKUPS:
            self._looks += 1
            return RetryDecision(MIN_BACKOFF_S, resume=True)
        is_unreachable = error.reason == ROUTER_UNREACHABLE
        if self._probing and (is_unreachable or isinstance(error, NotFoundError)):
            # If the request did arrive at a router that is unreachable, it ends there by itself.
            self._probing = False
            return RetryDecision(0.0, resume=False, needs_new_id=is_unreachable)
        if self._resumable and self._openings > 1 and isinstance(error, AlreadyExistsError):
            self._probing = True
            return RetryDecision(0.0, resume=True)
        if self._broke is not None and isinstance(error, NotFoundError):
            # The router that had the request is gone for good.
            error, self._broke = self._broke, None
        if told:
            raise error
        delay_s = self._retry.delay_s(self._openings, error)
        if delay_s is None:
            raise error
        self._openings += 1
        self._probing = broken
        return RetryDecision(delay_s, resume=broken)

    def _resume(self, error: OutriderError, now: float) -> RetryDecision:
        if self._broke is None:
            self._broke, self._broke_at = error, now
        if now - self._broke_at > self._retry.resume_s:
            raise error
        pause_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(self._pauses, 10))
        self._pauses += 1
        return RetryDecision(pause_s * (1.0 + self._retry.jitter * random.random()), resume=True)


def is_elsewhere(error: OutriderError) -> bool:
    """Return whether the error says that another router at the same address may have the stream.

    A router that shares its address and does not know the stream answers with a NOT_FOUND error
    that contains a retry delay.
    """
    return isinstance(error, NotFoundError) and error.retry_after_s is not None


def _is_break(error: OutriderError) -> bool:
    return isinstance(error, ConnectionLostError) or error.reason in (SHUTDOWN, ROUTER_UNREACHABLE)
