"""When a call is tried again. Pure: an error and a number of attempts in, a delay out."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.errors import OutriderError, ResourceExhaustedError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retries of calls of which nothing was heard yet, and for how long streams are resumed."""

    max_attempts: int = 6
    """Attempts in all; 1 never retries."""
    first_delay_s: float = 0.5
    """Delay before the second attempt; doubled at each further one."""
    max_delay_s: float = 8.0
    """Longest delay of the policy's own."""
    max_hint_s: float = 60.0
    """A server's hint beyond this is not waited for: the error is raised."""
    resume_s: float = 30.0
    """A stream that broke is taken up again for so long; 0 tries once."""
    jitter: float = 0.25
    """Share of a delay that is drawn at random, so that clients do not come back together."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be >= 1, got {self.max_attempts}")
        if not 0.0 <= self.first_delay_s <= self.max_delay_s:
            raise ValueError("first_delay_s must be in [0, max_delay_s]")
        if self.resume_s < 0.0:
            raise ValueError(f"resume_s must be >= 0, got {self.resume_s}")
        if not 0.0 <= self.jitter <= 1.0:
            raise ValueError(f"jitter must be in [0, 1], got {self.jitter}")

    def delay_s(self, attempt: int, error: OutriderError) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 1) failed; None: do not retry.

        Only UNAVAILABLE, and RESOURCE_EXHAUSTED with a hint, can get better by waiting.
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


def remaining(deadline: float | None, now: float) -> float | None:
    """Seconds left until a deadline; None without one."""
    return None if deadline is None else max(0.0, deadline - now)
