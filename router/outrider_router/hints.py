"""When a refused client may come back: hints that are true for all who were given one. Pure."""

from __future__ import annotations

MIN_RETRY_S = 0.05
MAX_RETRY_S = 30.0


class Promises:
    """Places that were held out to refused clients, one after the other.

    Clients that were all told the time of the next free place would meet there, and all but one be
    refused again. So each is told the time of a place behind those that were held out before. No
    place is kept: whoever comes first has it.
    """

    def __init__(self) -> None:
        self._last = 0.0
        """Clock time of the last place that was held out, seconds."""

    def hint_s(self, now: float, *, first_s: float, each_s: float) -> float:
        """Seconds until a place that nobody else was told of, within bounds.

        `first_s`: until the next free place; `each_s`: between one and the next.
        """
        at = max(now + first_s, self._last + each_s)
        # Beyond the bound the hints are no more true, and need not be remembered.
        self._last = at = min(at, now + MAX_RETRY_S)
        return max(MIN_RETRY_S, at - now)
