"""Retry-after hints for refused clients, each for a separate queue position. Pure.

If all clients were told when the next position becomes free, they would return together and all but
one would be refused again. So each client is told the time at which a further position becomes
free.
"""

from __future__ import annotations

from typing import Final

from outrider.ids import RequestId

MIN_RETRY_S = 0.05
MAX_RETRY_S = 30.0
HOLD_S = 2.0
"""Minimum time in seconds for which a queue position is held for a refused client. If half of the
time that the client was told to wait is longer, the position is held for that half. Clients add
random time to retry hints, so that they do not return together.
"""
MAX_KNOWN_FACTOR = 4
"""Largest number of refused clients that are remembered, as a multiple of the queue limit."""
REFUSALS: Final = {
    "QUEUE_FULL": "the queue is full: it holds at most {limit} requests; try again later",
    "DISPLACED": "the queue is full and a request of higher precedence took the position",
}
"""Maps the reason for which the queue refuses a request to the error message."""


class RetryTimes:
    """Retry times promised to clients, in ascending order."""

    def __init__(self) -> None:
        self._last = 0.0
        """Clock time that was promised last, in seconds."""

    def next_retry_s(self, now: float, *, first_s: float, each_s: float) -> float:
        """Return the seconds that a client is told to wait, between `MIN_RETRY_S` and
        `MAX_RETRY_S`. Each client is given a later time than the clients before it, up to the
        maximum.

        `first_s` is the wait of a client that is refused before all others, and `each_s` the time
        between the retries of two clients.
        """
        at = max(now + first_s, self._last + each_s)
        # Hints longer than the maximum are inexact anyway, so later clients need not wait behind
        # them.
        self._last = at = min(at, now + MAX_RETRY_S)
        return max(MIN_RETRY_S, at - now)


class HeldQueuePositions:
    """Queue positions that were promised to refused clients and are held for them.

    Refused clients thus form a second queue behind the queue. At most half of the queue is held, so
    that clients that do not return waste little capacity.
    """

    def __init__(self, queue_limit: int) -> None:
        """Create the positions of a queue that holds at most `queue_limit` requests."""
        self._max_kept = queue_limit // 2
        self._max_known = MAX_KNOWN_FACTOR * queue_limit
        self._promises = RetryTimes()
        self._due: dict[RequestId, tuple[float, float]] = {}
        """Start and end of the time for which a position is held for a request, as clock times in
        seconds.
        """

    def next_retry_s(self, request_id: RequestId | None, now: float, each_s: float) -> float:
        """Return the seconds until a position is free for a request that is refused now, and hold
        the position from then on.

        `each_s` is the time between two positions that become free. If `request_id` is None, the
        request cannot be recognized later, so no position is held for it. A client that returns too
        early is given the same time again. A client that returns in time but is refused again is
        told to wait for `each_s`.
        """
        known = self._due.get(request_id) if request_id is not None else None
        if known is None:
            # Positions become free irregularly, so the first one is not promised.
            hint_s = self._promises.next_retry_s(now, first_s=2.0 * each_s, each_s=each_s)
        elif known[0] > now:
            return max(MIN_RETRY_S, known[0] - now)
        else:
            hint_s = max(MIN_RETRY_S, each_s)
        if request_id is not None and (known is not None or len(self._due) < self._max_known):
            self._due[request_id] = now + hint_s, now + hint_s + max(HOLD_S, 0.5 * hint_s)
        return hint_s

    def is_due(self, request_id: RequestId, now: float) -> bool:
        """Return whether a position is held for this request at the clock time `now`."""
        due = self._due.get(request_id)
        return due is not None and due[0] <= now < due[1]

    def forget_request(self, request_id: RequestId) -> None:
        """Stop holding a position for a request."""
        self._due.pop(request_id, None)

    def num_held(self, now: float) -> int:
        """Return the number of positions that are held at the clock time `now`."""
        for request_id in [name for name, (_, end) in self._due.items() if end <= now]:
            del self._due[request_id]
        return min(len(self._due), self._max_kept)
