"""Retry policy of client calls.

Pure: a delay depends on the error and the number of attempts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.client.arguments import invalid_argument
from outrider.errors import OutriderError, ResourceExhaustedError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry policy for client calls that fail before their answer begins, and for broken streams.

    Raises InvalidRequestError (INVALID_OPTION) for values of a wrong type or outside their range.
    """

    max_attempts: int = 6
    """Total number of attempts; 1 disables retries."""
    first_delay_s: float = 0.5
    """Delay before the second attempt, in seconds. It doubles with each further attempt."""
    max_delay_s: float = 8.0
    """Maximum delay, in seconds, before jitter is added. If the server asks for a longer delay,
    that delay is used."""
    max_hint_s: float = 60.0
    """Maximum delay that the server may ask for, in seconds. If it asks for a longer one, the error
    is raised immediately."""
    resume_s: float = 30.0
    """Maximum time, in seconds, for which the client tries to resume a broken stream; with 0 it
    tries once."""
    jitter: float = 0.25
    """Maximum random increase of a delay, as a fraction of the delay in [0, 1]. It keeps clients
    from retrying at the same time."""

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
        """Return the time to wait, in seconds, after attempt number `attempt` (the first is 1) has
        failed with `error`; None if the call must not be retried.

        Retried are UNAVAILABLE errors, and those RESOURCE_EXHAUSTED errors that contain a retry
        delay.
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
    """Return the time from `now` to a deadline in seconds, at least 0; None if there is no
    deadline."""
    return None if deadline is None else max(0.0, deadline - now)
