"""Health of each drafter: response times, invalid messages, timeouts, rate limits. The module does
no I/O and reads no clock.

A drafter's health decides whether sessions wait for it, and whether it is disconnected because it
sends too much. Routers use it for placement (`AttachedDrafter`). All times are in seconds on the
same clock.
"""

from __future__ import annotations

import math
from typing import Final

from outrider.ids import DrafterId

BURST_ENTRIES: Final = 8192.0
"""Initial credit of a drafter, in entries; an entry is one proposal of a message. Every message and
every useless entry costs credit. Over time the credit is refilled up to this value. Requests for
drafts can raise it above this value."""
REFILL_ENTRIES_PER_S: Final = 512.0
"""Credit that a drafter regains per second, in entries."""
ENTRIES_PER_REQUEST: Final = 128.0
"""Credit in entries for each requested draft. A drafter with look-ahead drafts for many possible
prefixes, most of which do not occur."""
NODES_PER_ENTRY: Final = 64.0
"""Number of draft nodes that cost as much credit as one entry."""
ENTRIES_PER_RELEASE: Final = 256
"""Number of drafts that a drafter may still send, without penalty, after a session was taken from
it. They may have been in transit."""
MAX_DRAFTERS: Final = 256
"""Maximum number of drafters whose health is kept."""


class DrafterHealth:
    """Health of one drafter over all its connections.

    Used on the engine thread only, but any thread may read the counts.
    """

    def __init__(self) -> None:
        self.answers = 0
        """Number of usable proposals, plus rounds that found a draft on the device."""
        self.missed = 0
        """Number of waits for this drafter that ended by the proposal timeout."""
        self.invalid = 0
        """Number of invalid entries and messages; entries that only came too late do not count."""
        self.silent_since: float | None = None
        """Start of the first wait that timed out without any proposal from the drafter; None if the
        drafter is not silent."""
        self._heard_at = -math.inf
        self._credit, self._credited_at = BURST_ENTRIES, -math.inf
        self._strays = 0
        """Number of drafts for released sessions that are still excused: they may be in transit."""

    @property
    def is_silent(self) -> bool:
        """Whether the drafter is silent, so that sessions need not wait for its proposals."""
        return self.silent_since is not None

    @property
    def is_flooding(self) -> bool:
        """Whether the drafter has used up its credit, because it sent far more than was
        requested."""
        return self._credit < 0.0

    def silent_s(self, now: float) -> float:
        """Return how long the drafter has been silent, in seconds, or 0 if it is not silent."""
        since = self.silent_since
        return 0.0 if since is None else max(0.0, now - since)

    def record_attach(self) -> None:
        """Record that the drafter connected again, which ends its silence."""
        self.silent_since = None

    def record_requests(self, wishes: int) -> None:
        """Record that `wishes` drafts were requested. The drafter may then send more proposals
        before it counts as flooding the verifier."""
        self._credit = min(
            self._credit + ENTRIES_PER_REQUEST * wishes,
            BURST_ENTRIES + ENTRIES_PER_REQUEST * wishes,
        )

    def record_release(self) -> None:
        """Record that a session was taken from the drafter; its drafts may still be in transit."""
        self._strays = min(self._strays + ENTRIES_PER_RELEASE, int(BURST_ENTRIES))

    def record_proposals(
        self, now: float, *, entries: int, nodes: int, useful: int, unsound: int, strays: int
    ) -> bool:
        """Record a message of proposals, and return whether the drafter was silent before it.

        Of its `entries`, `useful` are usable, `unsound` fail validation, and `strays` are for
        sessions that the drafter does not serve. `nodes` is the number of draft nodes.
        """
        self.answers += useful
        excused = min(strays, self._strays)
        self._strays -= excused
        self.invalid += unsound + strays - excused
        self._pay(now, 1.0 + entries - useful + nodes / NODES_PER_ENTRY)
        self._heard_at = now
        missed, self.silent_since = self.is_silent, None
        return missed

    def record_device_drafts(self, now: float, rounds: int) -> None:
        """Record that `rounds` rounds found drafts of the drafter in device memory."""
        self.answers += rounds
        self._heard_at, self.silent_since = now, None

    def record_malformed(self, now: float) -> None:
        """Record a message that could not be decoded."""
        self.invalid += 1
        self._pay(now, 1.0)

    def record_lost_sessions(self, sessions: int, now: float) -> None:
        """Record a message in which the drafter reported that it has lost `sessions` sessions."""
        self._pay(now, 1.0 + sessions)

    def record_timeout(self, since: float) -> bool:
        """Record a timed-out wait that began at `since`, and return whether this made the drafter
        silent."""
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
    """Health of drafters by drafter id, kept when a drafter disconnects and connects again."""

    def __init__(self) -> None:
        self._known: dict[DrafterId, DrafterHealth] = {}

    def __len__(self) -> int:
        """Return the number of drafters whose health is kept."""
        return len(self._known)

    def get_health(self, drafter_id: DrafterId) -> DrafterHealth:
        """Return the health of a drafter, which is created if the drafter is new.

        Beyond `MAX_DRAFTERS` drafters the oldest one is removed.
        """
        known = self._known.get(drafter_id)
        if known is None:
            while len(self._known) >= MAX_DRAFTERS:
                del self._known[next(iter(self._known))]
            known = self._known[drafter_id] = DrafterHealth()
        return known
