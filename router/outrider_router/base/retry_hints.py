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
"""A place is kept this long for the client that was told of it, or half as long as it had to wait:
clients add to what they are told, so that they do not come together."""
MAX_KNOWN_FACTOR = 4
"""Refused clients that are known when they come back, as a multiple of the queue's limit."""
REFUSALS: Final = {
    "QUEUE_FULL": "there is no room in the queue, which holds {limit} requests; try again later",
    "DISPLACED": "the queue is full, and a request that goes first took the place",
}
"""What those are told who have no place in the queue, by reason."""


class RetryTimes:
    """Retry times promised to clients, one after the other."""

    def __init__(self) -> None:
        self._last = 0.0
        """Clock time that was held out last, seconds."""

    def next_retry_s(self, now: float, *, first_s: float, each_s: float) -> float:
        """Seconds until a time that nobody else was told of, within bounds.

        `first_s`: until the next one; `each_s`: between one and the next.
        """
        at = max(now + first_s, self._last + each_s)
        # Beyond the bound the hints are no more true, and need not be remembered.
        self._last = at = min(at, now + MAX_RETRY_S)
        return max(MIN_RETRY_S, at - now)


class HeldQueuePositions:
    """Queue positions that were promised to refused clients and are held for them.

    So those that were refused form a queue behind the queue. What becomes free is theirs, as long
    as the queue itself is half full: what they may not come back for is not lost.
    """

    def __init__(self, queue_limit: int) -> None:
        """At most half of a queue of so many is kept."""
        self._max_kept = queue_limit // 2
        self._max_known = MAX_KNOWN_FACTOR * queue_limit
        self._promises = RetryTimes()
        self._due: dict[RequestId, tuple[float, float]] = {}
        """Clock times from which and until which a request finds its place, seconds."""

    def next_retry_s(self, request_id: RequestId | None, now: float, each_s: float) -> float:
        """Seconds until a place is free for a request that is refused now.

        `each_s`: between one place that becomes free and the next; `request_id` None: it will not
        be known when it comes back, so nothing is kept for it. Whoever comes too early is told
        the same time again, and whoever comes in time and finds none the time of the next one.
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
        """Whether a place is kept for this request now."""
        due = self._due.get(request_id)
        return due is not None and due[0] <= now < due[1]

    def forget_request(self, request_id: RequestId) -> None:
        """A request needs no place any more."""
        self._due.pop(request_id, None)

    def num_held(self, now: float) -> int:
        """Places that are kept now."""
        for request_id in [name for name, (_, end) in self._due.items() if end <= now]:
            del self._due[request_id]
        return min(len(self._due), self._max_kept)
