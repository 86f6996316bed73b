"""Circuit breakers that quarantine slow, silent or faulty drafters.

Each pair of verifier and drafter has a circuit breaker. After a fault the drafter gets no sessions
for a back-off time, and then one session as a probe. If the probe succeeds, the breaker closes; if
not, the next back-off is twice as long. The evidence comes from the verifier, which waits for
proposals and validates them. Times are seconds of one clock. `Quarantine` decides and is pure.
`QuarantineManager` feeds it with the reports of verifiers, and logs and counts its decisions.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from outrider.ids import DrafterId, VerifierId
from outrider.wire.messages import AttachedDrafter, VerifierInfo
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.reasons import QuarantineReason

logger = logging.getLogger(__name__)

MIN_BACKOFF_S: Final = 1.0
"""Duration of the first quarantine in seconds; it doubles with each further one."""
MAX_BACKOFF_S: Final = 60.0
JITTER_SHARE: Final = 0.2
"""Largest random change of a quarantine's duration, as a fraction, which spreads the probes of many
drafters.
"""
BREAKER_RESET_S: Final = 60.0
"""Time in seconds without a fault after which the back-off time is again `MIN_BACKOFF_S`."""
MAX_PROBE_S: Final = 10.0
"""Time in seconds after which a probe without a fault succeeds even with few proposals, because its
session may need no drafts.
"""
MIN_PROBE_ANSWERS: Final = 4
"""Number of usable proposals after which a probe succeeds."""
MAX_SILENCE_S: Final = 0.75
"""Time in seconds after which a drafter counts as silent, if a session has needed its proposals and
none has arrived.
"""
MAX_INVALID_MESSAGES: Final = 8
"""The breaker opens if this number of invalid messages arrived between two polls. If no usable
proposal arrived, half of this number is enough.
"""
MIN_TIMEOUTS: Final = 4
"""A poll finds a drafter slow if at least this number of proposals timed out since the previous
poll, and more proposals timed out than arrived.
"""
SLOW_FACTOR, SLOW_FLOOR_MS = 8.0, 50.0
"""A poll also finds a drafter slow if its proposals take `SLOW_FACTOR` times as long as those of
the fastest other drafter, and at least `SLOW_FLOOR_MS` milliseconds longer.
"""
MIN_SLOW_POLLS: Final = 3
"""Number of polls in a row that must find a drafter slow, because a busy machine may be slow for a
moment.
"""


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    """The drafter gets sessions."""
    OPEN = "open"
    """The drafter gets no sessions."""
    PROBING = "probing"
    """The drafter gets one session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterEvidence:
    """A verifier's statistics of one drafter at one poll. `answers`, `missed` and `invalid` count
    usable proposals, timeouts and invalid messages since the verifier started.
    """

    sessions: int
    answers: int = 0
    missed: int = 0
    invalid: int = 0
    silent_s: float = 0.0
    answer_ms: float = 0.0
    """Time in milliseconds from the end of a round to the arrival of the proposals for the next
    one; 0 if unknown.
    """
    soonest_ms: float = 0.0
    """`answer_ms` of the fastest other drafter; 0 if there is none."""


class CircuitBreaker:
    """Circuit breaker of one drafter at one verifier."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.reason: QuarantineReason | None = None
        """Reason for which the breaker is not closed; None if it is closed."""
        self.until = 0.0
        """Clock time in seconds at which an open breaker begins to probe."""
        self._backoff_s = MIN_BACKOFF_S
        self._since = 0.0
        """Clock time in seconds of the last change of the state."""
        self._last: DrafterEvidence | None = None
        self._slow_looks = 0
        self._right = 0
        """Number of usable proposals since a probe began."""

    @property
    def max_sessions(self) -> int | None:
        """Largest number of the verifier's sessions that the drafter may have; None if
        unlimited.
        """
        return {BreakerState.CLOSED: None, BreakerState.OPEN: 0, BreakerState.PROBING: 1}[
            self.state
        ]

    def update(self, seen: DrafterEvidence, now: float, chance: float) -> QuarantineReason | None:
        """Process the statistics `seen` of a poll at the clock time `now`. Return the reason if the
        breaker opened, else None.

        `chance` is a random number in [0, 1), by which the duration of a quarantine is varied.
        """
        new = self._since_last(seen)
        if self.state is BreakerState.OPEN:
            if now >= self.until:
                self._turn(BreakerState.PROBING, now)
            return None
        illness = self._illness(seen, new)
        if illness is not None:
            self._open(illness, now, chance)
            return illness
        if self.state is BreakerState.PROBING:
            self._right += new.answers
            if not seen.sessions:
                # The probe has no session yet, or its session has ended; the next session continues
                # it.
                self._since = now
            elif self._right >= MIN_PROBE_ANSWERS or now - self._since >= MAX_PROBE_S:
                self.reason = None
                self._turn(BreakerState.CLOSED, now)
        elif now - self._since >= BREAKER_RESET_S:
            self._backoff_s = MIN_BACKOFF_S
        return None

    def _since_last(self, seen: DrafterEvidence) -> _EvidenceDelta:
        last, self._last = self._last, seen
        if last is None or any(
            now < was
            for now, was in (
                (seen.answers, last.answers),
                (seen.missed, last.missed),
                (seen.invalid, last.invalid),
            )
        ):
            # The first poll, or the verifier was restarted: there is no earlier state to compare
            # with.
            return _EvidenceDelta(0, 0, 0)
        return _EvidenceDelta(
            seen.answers - last.answers, seen.missed - last.missed, seen.invalid - last.invalid
        )

    def _illness(self, seen: DrafterEvidence, new: _EvidenceDelta) -> QuarantineReason | None:
        if new.invalid >= MAX_INVALID_MESSAGES or (
            2 * new.invalid >= MAX_INVALID_MESSAGES and not new.answers
        ):
            return QuarantineReason.WRONG
        if seen.sessions and seen.silent_s >= MAX_SILENCE_S:
            return QuarantineReason.SILENT
        late = new.missed >= MIN_TIMEOUTS and new.missed > new.answers
        far = seen.soonest_ms > 0.0 and seen.answer_ms >= max(
            SLOW_FACTOR * seen.soonest_ms, seen.soonest_ms + SLOW_FLOOR_MS
        )
        if self.state is BreakerState.PROBING:
            # The mean `answer_ms` still includes the time before the quarantine.
            return QuarantineReason.SLOW if seen.sessions and late else None
        slow = bool(seen.sessions) and (late or (far and new.answers + new.missed > 0))
        self._slow_looks = self._slow_looks + 1 if slow else 0
        return QuarantineReason.SLOW if self._slow_looks >= MIN_SLOW_POLLS else None

    def _open(self, reason: QuarantineReason, now: float, chance: float) -> None:
        self.reason = reason
        self.until = now + self._backoff_s * (1.0 + JITTER_SHARE * (2.0 * chance - 1.0))
        self._backoff_s = min(2.0 * self._backoff_s, MAX_BACKOFF_S)
        self._turn(BreakerState.OPEN, now)

    def _turn(self, state: BreakerState, now: float) -> None:
        self.state, self._since = state, now
        self._slow_looks = self._right = 0


class _EvidenceDelta(NamedTuple):
    answers: int
    missed: int
    invalid: int


class Quarantine:
    """Circuit breakers of all drafters of a fleet."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """Create a quarantine without breakers. `chance` returns random numbers in [0, 1)."""
        self._chance = chance
        self._breakers: dict[tuple[VerifierId, DrafterId], CircuitBreaker] = {}

    def update(
        self, info: VerifierInfo, known: Collection[DrafterId], now: float
    ) -> list[tuple[DrafterId, QuarantineReason | None]]:
        """Process a verifier's statistics of its drafters. Return a pair of drafter id and reason
        for each drafter whose breaker changed its state.

        The reason is None if the breaker did not open, so that the drafter may have more sessions
        than before. Drafters that are not in `known` are ignored. The breaker of a detached drafter
        is kept, because a new connection does not repair the drafter.
        """
        changed: list[tuple[DrafterId, QuarantineReason | None]] = []
        for link in info.drafters:
            if link.drafter_id not in known:
                continue
            breaker = self._breakers.setdefault(
                (info.verifier_id, link.drafter_id), CircuitBreaker()
            )
            before = breaker.state
            reason = breaker.update(make_evidence(link, info.drafters), now, self._chance())
            if breaker.state is not before:
                changed.append((link.drafter_id, reason))
        return changed

    def forget_drafter(self, drafter_id: DrafterId) -> None:
        """Delete the breakers of a drafter that was removed or replaced."""
        for key in [key for key in self._breakers if key[1] == drafter_id]:
            del self._breakers[key]

    def get_breaker(self, verifier_id: VerifierId, drafter_id: DrafterId) -> CircuitBreaker | None:
        """Return the breaker of a drafter at a verifier, or None if there is none."""
        return self._breakers.get((verifier_id, drafter_id))


def make_evidence(link: AttachedDrafter, links: Iterable[AttachedDrafter]) -> DrafterEvidence:
    """Return a verifier's statistics of the drafter `link`, with the fastest other drafter among
    `links`.
    """
    others = [o.answer_ms for o in links if o.drafter_id != link.drafter_id and o.answer_ms]
    return DrafterEvidence(
        sessions=link.sessions,
        answers=link.answers,
        missed=link.proposal_timeouts,
        invalid=link.invalid,
        silent_s=link.silent_ms / 1000.0,
        answer_ms=link.answer_ms,
        soonest_ms=min(others, default=0.0),
    )


class QuarantineManager:
    """Quarantine of a router's drafters. Use from one event loop."""

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Create a manager without breakers. `on_change` is called when sessions should be moved,
        and `chance` returns random numbers in [0, 1).
        """
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._quarantine = Quarantine(chance)

    def update(self, info: VerifierInfo, known: Collection[DrafterId]) -> None:
        """Quarantine faulty drafters among `known` and probe or release quarantined ones.

        `info` holds the statistics that a verifier reports about its drafters.
        """
        changed = False
        for drafter_id, reason in self._quarantine.update(info, known, self._clock()):
            changed = True
            facts = {"drafter_id": drafter_id, "verifier_id": info.verifier_id}
            if reason is None:
                logger.info("drafter released from quarantine or probed", extra=facts)
                continue
            self._metrics.drafter_quarantines.labels(reason).inc()
            logger.warning(
                "drafter quarantined",
                extra=facts | {"reason": reason.value},
            )
        if changed:
            self._on_change()

    def forget_drafter(self, drafter_id: DrafterId) -> None:
        """Delete the breakers of a drafter that was removed, or whose id another process has
        now.
        """
        self._quarantine.forget_drafter(drafter_id)

    def session_limits(self, info: VerifierInfo) -> dict[DrafterId, int]:
        """Return the largest number of the verifier's sessions that each of its quarantined
        drafters may have: 0 in quarantine, 1 while it is probed.
        """
        names = [drafter.drafter_id for drafter in info.drafters]
        breakers = {name: self._quarantine.get_breaker(info.verifier_id, name) for name in names}
        return {
            n: b.max_sessions
            for n, b in breakers.items()
            if b is not None and b.max_sessions is not None
        }

    def quarantine_status(
        self, verifier_id: VerifierId, drafter_id: DrafterId
    ) -> tuple[str, float]:
        """Return the reason for which a drafter is in quarantine at a verifier, and the seconds
        until it is probed. The reason is "" if the drafter is not in quarantine.
        """
        breaker = self._quarantine.get_breaker(verifier_id, drafter_id)
        if breaker is None or breaker.reason is None:
            return "", 0.0
        return breaker.reason.value, max(0.0, breaker.until - self._clock())
