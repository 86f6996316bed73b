"""Retry policy of client calls. Pure: an error and a number of attempts in, a delay out."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.client.arguments import invalid_argument
from outrider.errors import OutriderError, ResourceExhaustedError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry policy of calls without an answer yet, and of broken streams.

    Raises InvalidRequestError (INVALID_OPTION) for values of the wrong type or range.
    """

    max_attempts: int = 6
    """Total number of attempts; 1 disables retries."""
    first_delay_s: float = 0.5
    """Delay before the second attempt in seconds; it doubles with each further attempt."""
    max_delay_s: float = 8.0
    """Maximum delay in seconds, unless the server gives a hint."""
    max_hint_s: float = 60.0
    """Maximum retry hint of a server in seconds; with a longer hint the error is raised at once."""
    resume_s: float = 30.0
    """Time in seconds for which the client tries to resume a broken stream; 0 tries once."""
    jitter: float = 0.25
    """Random share of a delay, in [0, 1], so that clients do not retry at the same time."""

    def __post_init__(self) -> None:
        if not _is_number(self.max_attempts, int) or self.max_attempts < 1:
            raise invalid_argument("max_attempts", "an integer >= 1", self.max_attempts)
        for name in ("first_delay_s", "max_delay_s", "max_hint_s", "resume_s", "jitter"):
            value = getattr(self, name)
            if not (_is_number(value, (int, float)) and value >= 0.0):
                raise invalid_argument(name, "a number >= 0", value)
        if self.first_delay_s > self.max_delay_s:
            wanted = f"at most max_delay_s ({self.max_delay_s})"
            raise invalid_argument("first_delay_s", wanted, self.first_delay_s)
        if self.jitter > 1.0:
            raise invalid_argument("jitter", "in [0, 1]", self.jitter)

    def delay_s(self, attempt: int, error: OutriderError) -> float | None:
        """Seconds to wait after the failed attempt number `attempt` (from 1); None: do not retry.

        Only UNAVAILABLE, and RESOURCE_EXHAUSTED with a hint, are retried.
        """
        hint = error.retry_after_s
        retryable = isinstance(error, UnavailableError) or (
            isinstance(error, ResourceExhaustedError) and hint is not None
        )
        if not retryable or attempt >= self.max_attempts:
            return None
        if hint is not None and hint > self.max_hint_s:
            return None
        own = min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))
        return max(own, hint or 0.0) * (1.0 + self.jitter * random.random())


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def remaining(deadline: float | None, now: float) -> float | None:
    """Seconds left until a deadline; None without one."""
    return None if deadline is None else max(0.0, deadline - now)
