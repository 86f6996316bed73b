"""Circuit breakers that quarantine slow, silent or faulty drafters.

Each pair of verifier and drafter has a circuit breaker: after a fault the drafter gets no sessions
for a back-off, then one session as a probe; if that goes well the breaker closes, and if not the
next back-off is twice as long. The evidence comes from the verifier, which waits for proposals and
validates them. Times are seconds of one clock. `Quarantine`
decides and is pure; `QuarantineManager` feeds it with the reports of verifiers, and logs and counts
what it decides.
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
"""The first back-off."""
MAX_BACKOFF_S: Final = 60.0
JITTER_SHARE: Final = 0.2
"""How much of a back-off is left to chance, so that probes of many drafters do not meet."""
BREAKER_RESET_S: Final = 60.0
"""How long a drafter must be well for its next back-off to be a first one."""
MAX_PROBE_S: Final = 10.0
"""A probe that proves nothing for so long is taken for a good one: the session wants no drafts."""
MIN_PROBE_ANSWERS: Final = 4
"""Proposals that could be of use which a probe must bring."""
MAX_SILENCE_S: Final = 0.75
"""A drafter that is missed for so long is silent."""
MAX_INVALID_MESSAGES: Final = 8
"""So much that is wrong between two looks is enough, and half of it if nothing was right."""
MIN_TIMEOUTS: Final = 4
"""Waits in vain between two looks that may show a drafter to be slow, where they are more than its
answers."""
SLOW_FACTOR, SLOW_FLOOR_MS = 8.0, 50.0
"""A drafter is far beyond its peers that answers so many times later than the soonest of them, and
so much later."""
MIN_SLOW_POLLS: Final = 3
"""Looks in a row that must find a drafter slow: a busy machine is slow for a moment."""


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    """The drafter gets sessions."""
    OPEN = "open"
    """It gets none."""
    PROBING = "probing"
    """It gets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterEvidence:
    """A verifier's statistics of a drafter at one poll; counters only grow."""

    sessions: int
    answers: int = 0
    missed: int = 0
    invalid: int = 0
    silent_s: float = 0.0
    answer_ms: float = 0.0
    """From a round's end to its proposals; 0: not known."""
    soonest_ms: float = 0.0
    """The same of the other drafter that answers soonest; 0: there is none."""


class CircuitBreaker:
    """Circuit breaker of one drafter at one verifier."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.reason: QuarantineReason | None = None
        """Why it is not closed."""
        self.until = 0.0
        """When an open one begins to probe."""
        self._backoff_s = MIN_BACKOFF_S
        self._since = 0.0
        """When its state changed last."""
        self._last: DrafterEvidence | None = None
        self._slow_looks = 0
        self._right = 0
        """Answers since a probe began."""

    @property
    def max_sessions(self) -> int | None:
        """Sessions of the verifier that the drafter may have; None: as many as there are."""
        return {BreakerState.CLOSED: None, BreakerState.OPEN: 0, BreakerState.PROBING: 1}[
            self.state
        ]

    def update(self, seen: DrafterEvidence, now: float, chance: float) -> QuarantineReason | None:
        """Take in what a verifier says; `chance` in [0, 1). Why the breaker opened, if it did."""
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
                # The probe has not begun, or its session has ended: the next one goes on with it.
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
            # The first look, or the verifier was restarted: nothing is known of what was before.
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
            # A mean is slow to forget what was before.
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
    """The breakers of a fleet."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """`chance` draws from [0, 1)."""
        self._chance = chance
        self._breakers: dict[tuple[VerifierId, DrafterId], CircuitBreaker] = {}

    def update(
        self, info: VerifierInfo, known: Collection[DrafterId], now: float
    ) -> list[tuple[DrafterId, QuarantineReason | None]]:
        """Take in what a verifier says of its drafters; whose breakers opened and why, and (None)
        who may have more sessions than before. Only of those that are `known`: names of others
        cost nothing here.

        That of a drafter which is not attached any more is kept: a new connection does not heal.
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
        """The drafter is another one now, or none."""
        for key in [key for key in self._breakers if key[1] == drafter_id]:
            del self._breakers[key]

    def get_breaker(self, verifier_id: VerifierId, drafter_id: DrafterId) -> CircuitBreaker | None:
        """The breaker of a drafter at a verifier that was seen there."""
        return self._breakers.get((verifier_id, drafter_id))


def make_evidence(link: AttachedDrafter, links: Iterable[AttachedDrafter]) -> DrafterEvidence:
    """What a verifier that has these drafters says of one of them."""
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
    """The quarantine of a router's drafters; event loop only."""

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`on_change` hears that sessions should be moved now; `chance` draws from [0, 1)."""
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
        """The drafter is gone, or another process has its name now."""
        self._quarantine.forget_drafter(drafter_id)

    def session_limits(self, info: VerifierInfo) -> dict[DrafterId, int]:
        """How many of a verifier's sessions its drafters in quarantine may have."""
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
        """Why a drafter gets no sessions of a verifier, and in how many seconds one, to see; ""
        where it gets them."""
        breaker = self._quarantine.get_breaker(verifier_id, drafter_id)
        if breaker is None or breaker.reason is None:
            return "", 0.0
        return breaker.reason.value, max(0.0, breaker.until - self._clock())
