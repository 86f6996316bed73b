"""Attempts of one request: after a failure retry, resume the stream, or give up.

Pure: an error, what was received and the time in, a decision out.
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
"""Maximum pause between two attempts to resume a stream, in seconds; a user is waiting."""
MAX_ROUTER_LOOKUPS = 32
"""Maximum number of connections that search for an answer where several routers share an address.
All 32 connections lead to wrong routers once in ten thousand cases with four routers, and once in
seventy with eight."""
SHUTDOWN = "SHUTDOWN"
"""Reason of the errors of a router that stops; it, or one with its journal, may be back soon."""


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Retry after a delay; `resume`: continue the stream behind what was received."""

    delay_s: float
    resume: bool


class RequestAttempts:
    """The attempts of one request.

    Opening it is retried by the policy; an attempt that broke may have arrived, so its stream is
    asked for before it is sent again. Once something was heard, a connection that breaks is
    followed by attempts to take the stream up again.
    """

    def __init__(self, retry: RetryPolicy, *, resumable: bool) -> None:
        self._retry = retry
        self._resumable = resumable
        self._openings = 1
        self._probing = False
        """Whether the next attempt asks for the stream of an attempt whose connection broke."""
        self._pauses = 0
        self._looks = 0
        """Number of routers that did not have the answer while another router at the address
        may."""
        self._broke: OutriderError | None = None
        self._broke_at = 0.0

    def record_message(self) -> None:
        """Record a received message: the connection works again."""
        self._broke = None
        self._probing = False
        self._pauses = self._looks = 0

    def decide_after(
        self, error: OutriderError, *, now: float, informed: bool = False, told: bool = False
    ) -> RetryDecision:
        """What to do about a failed attempt; raises the error if that is nothing.

        `informed`: it was heard that the request was admitted; `told`: some of its answer; `now`
        in seconds.
        """
        broken = self._resumable and _is_break(error)
        if broken and informed:
            return self._resume(error, now)
        if is_elsewhere(error) and self._looks < MAX_ROUTER_LOOKUPS:
            self._looks += 1
            return RetryDecision(MIN_BACKOFF_S, resume=True)
        if self._probing and isinstance(error, NotFoundError):
            self._probing = False
            return RetryDecision(0.0, resume=False)
        if self._resumable and self._openings > 1 and isinstance(error, AlreadyExistsError):
            self._probing = True
            return RetryDecision(0.0, resume=True)
        if self._broke is not None and isinstance(error, NotFoundError):
            # The router that knew of the request is gone for good.
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
    """Return whether the stream may be on another router at the same address.

    Only then does the error of the router that was asked say when to retry.
    """
    return isinstance(error, NotFoundError) and error.retry_after_s is not None


def _is_break(error: OutriderError) -> bool:
    return isinstance(error, ConnectionLostError) or error.reason == SHUTDOWN
