"""Health of each drafter: response times, invalid messages, timeouts, rate limits. Pure.

Read by sessions that wait for a drafter, by routers for placement (`AttachedDrafter`), and to
disconnect drafters that send too much. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from typing import Final

from outrider.ids import DrafterId

BURST_ENTRIES: Final = 8192.0
"""What of no use a drafter may send beyond what was asked of it: entries of proposals, messages."""
REFILL_ENTRIES_PER_S: Final = 512.0
"""How much of that comes back every second."""
ENTRIES_PER_REQUEST: Final = 128.0
"""What a wanted draft entitles a drafter to: with look-ahead it guesses at many prefixes, and most
of them do not come about."""
NODES_PER_ENTRY: Final = 64.0
"""Nodes of drafts that count as one entry."""
ENTRIES_PER_RELEASE: Final = 256
"""Drafts that may still be on their way for a session that was taken from a drafter."""
MAX_DRAFTERS: Final = 256
"""Drafters that are remembered."""


class DrafterHealth:
    """Health of one drafter over all its connections.

    Engine thread only; counts are read anywhere.
    """

    def __init__(self) -> None:
        self.answers = 0
        """Proposals that could be of use."""
        self.missed = 0
        """Waits that ran into their proposal timeout."""
        self.invalid = 0
        """What was no good; not what merely came too late."""
        self.silent_since: float | None = None
        """Since when a session had waited in vain when nothing had been heard meanwhile; None:
        nobody misses the drafter."""
        self._heard_at = -math.inf
        self._credit, self._credited_at = BURST_ENTRIES, -math.inf
        self._strays = 0
        """Drafts for sessions of others that are not its fault: they were on their way."""

    @property
    def is_silent(self) -> bool:
        """Whether nobody needs to wait for it."""
        return self.silent_since is not None

    @property
    def is_flooding(self) -> bool:
        """Whether it sent more than anybody can have asked for."""
        return self._credit < 0.0

    def silent_s(self, now: float) -> float:
        """How long it has been missed; 0: nobody does."""
        since = self.silent_since
        return 0.0 if since is None else max(0.0, now - since)

    def record_attach(self) -> None:
        """It has connected anew, and so said something."""
        self.silent_since = None

    def record_requests(self, wishes: int) -> None:
        """So many drafts were wanted of it."""
        self._credit = min(
            self._credit + ENTRIES_PER_REQUEST * wishes,
            BURST_ENTRIES + ENTRIES_PER_REQUEST * wishes,
        )

    def record_release(self) -> None:
        """A session was taken from it, and it has yet to hear so."""
        self._strays = min(self._strays + ENTRIES_PER_RELEASE, int(BURST_ENTRIES))

    def record_proposals(
        self, now: float, *, entries: int, nodes: int, useful: int, unsound: int, strays: int
    ) -> bool:
        """Proposals came: so many entries, of which so many may be used, fail validation, or are
        for sessions that are not the drafter's. Whether it had been missed."""
        self.answers += useful
        excused = min(strays, self._strays)
        self._strays -= excused
        self.invalid += unsound + strays - excused
        self._pay(now, 1.0 + entries - useful + nodes / NODES_PER_ENTRY)
        self._heard_at = now
        missed, self.silent_since = self.is_silent, None
        return missed

    def record_device_drafts(self, now: float, rounds: int) -> None:
        """Rounds found drafts of it on the device."""
        self.answers += rounds
        self._heard_at, self.silent_since = now, None

    def record_malformed(self, now: float) -> None:
        """A message came that could not be read."""
        self.invalid += 1
        self._pay(now, 1.0)

    def record_lost_sessions(self, sessions: int, now: float) -> None:
        """It said that it follows so many sessions no longer."""
        self._pay(now, 1.0 + sessions)

    def record_timeout(self, since: float) -> bool:
        """A wait that had begun at `since` was in vain. Whether nobody is to wait any more."""
        self.missed += 1
        if self.is_silent or self._heard_at >= since:
            return False
        self.silent_since = since
        return True

    def _pay(self, now: float, cost: float) -> None:
        back = REFILL_ENTRIES_PER_S * (now - self._credited_at)
        if self._credit < BURST_ENTRIES:
            self._credit = min(BURST_ENTRIES, self._credit + back)
        self._credited_at = now
        self._credit -= cost


class DrafterHealthRegistry:
    """What is remembered of drafters, by name: a new connection does not wash anybody clean."""

    def __init__(self) -> None:
        self._known: dict[DrafterId, DrafterHealth] = {}

    def __len__(self) -> int:
        """Drafters that are remembered."""
        return len(self._known)

    def get_health(self, drafter_id: DrafterId) -> DrafterHealth:
        """The conduct of a drafter; of many names the oldest is forgotten."""
        known = self._known.get(drafter_id)
        if known is None:
            while len(self._known) >= MAX_DRAFTERS:
                del self._known[next(iter(self._known))]
            known = self._known[drafter_id] = DrafterHealth()
        return known
