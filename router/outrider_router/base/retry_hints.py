"""Retry-after hints for refused clients, each for a queue position of its own. Pure.

Clients that were all given the time of the next free position would return together, and all but
one be refused again. So each is given the time of a position behind those promised before.
"""

from __future__ import annotations

from typing import Final

from outrider.ids import RequestId

MIN_RETRY_S = 0.05
MAX_RETRY_S = 30.0
HOLD_S = 2.0
"""Time for which a queue position is held for a refused client, or half of its wait if that is
longer. Clients add random time to retry hints, so that they do not return together."""
MAX_KNOWN_FACTOR = 4
"""Number of refused clients that are remembered, as a multiple of the queue's limit."""
REFUSALS: Final = {
    "QUEUE_FULL": "the queue is full: it holds at most {limit} requests; try again later",
    "DISPLACED": "the queue is full and a request of higher precedence took the position",
}
"""Error messages of requests that the queue refuses, by reason."""


class RetryTimes:
    """Retry times promised to clients, one after the other."""

    def __init__(self) -> None:
        self._last = 0.0
        """Clock time that was held out last, seconds."""

    def next_retry_s(self, now: float, *, first_s: float, each_s: float) -> float:
        """Return the seconds until a retry time that no other client was given, within limits.

        `first_s` is the time until the next one, `each_s` the time between two.
        """
        at = max(now + first_s, self._last + each_s)
        # Beyond the bound the hints are no more true, and need not be remembered.
        self._last = at = min(at, now + MAX_RETRY_S)
        return max(MIN_RETRY_S, at - now)


class HeldQueuePositions:
    """Queue positions that were promised to refused clients and are held for them.

    Refused clients thus form a queue behind the queue. Positions are held only while the queue is
    at least half full, so that clients that do not return waste no capacity.
    """

    def __init__(self, queue_limit: int) -> None:
        """At most half of a queue of so many is kept."""
        self._max_kept = queue_limit // 2
        self._max_known = MAX_KNOWN_FACTOR * queue_limit
        self._promises = RetryTimes()
        self._due: dict[RequestId, tuple[float, float]] = {}
        """Clock times from which and until which a request finds its place, seconds."""

    def next_retry_s(self, request_id: RequestId | None, now: float, each_s: float) -> float:
        """Return the seconds until a position is free for a request that is refused now.

        `each_s` is the time between two positions that become free. With `request_id` None the
        request cannot be recognized later, so no position is held for it. A client that returns too
        early gets the same time again; one that returns in time and finds no position gets the next
        time.
        """
        known = self._due.get(request_id) if request_id is not None else None
        if known is None:
            # Places do not become free like clockwork: the first one is left out.
            hint_s = self._promises.next_retry_s(now, first_s=2.0 * each_s, each_s=each_s)
        elif known[0] > now:
            return max(MIN_RETRY_S, known[0] - now)
        else:
            hint_s = max(MIN_RETRY_S, each_s)
        if request_id is not None and (known is not None or len(self._due) < self._max_known):
            self._due[request_id] = now + hint_s, now + hint_s + max(HOLD_S, 0.5 * hint_s)
        return hint_s

    def is_due(self, request_id: RequestId, now: float) -> bool:
        """Return whether a position is held for this request now."""
        due = self._due.get(request_id)
        return due is not None and due[0] <= now < due[1]

    def forget_request(self, request_id: RequestId) -> None:
        """Forget a request that needs no position any more."""
        self._due.pop(request_id, None)

    def num_held(self, now: float) -> int:
        """Number of positions that are held now."""
        for request_id in [name for name, (_, end) in self._due.items() if end <= now]:
            del self._due[request_id]
        return min(len(self._due), self._max_kept)
