"""Quarantine manager: updates the circuit breakers from verifier reports, and logs changes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection

from outrider.ids import DrafterId, VerifierId
from outrider.wire.messages import VerifierInfo
from outrider_router.base.metrics import RouterMetrics
from outrider_router.fleet.quarantine import Quarantine

logger = logging.getLogger(__name__)


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
        """Put `known` drafters in quarantine that a verifier has something to say against, and let
        out those whose time has come."""
        changed = False
        for drafter_id, reason in self._quarantine.update(info, known, self._clock()):
            changed = True
            facts = {"drafter_id": drafter_id, "verifier_id": info.verifier_id}
            if reason is None:
                logger.info("drafter is probed or well again", extra=facts)
                continue
            self._metrics.drafter_quarantines.labels(reason).inc()
            logger.warning(
                "drafter in quarantine: its sessions go to others, or decode plainly",
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
