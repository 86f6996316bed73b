"""Speculation counters of one request, updated in place."""

from __future__ import annotations

from itertools import accumulate

from outrider.wire.messages import (
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    PAUSED,
    PLANNED,
    TARGET_ONLY,
    SpecStats,
)
from outrider.wire.spec_stats_accumulator import describe_decision


class SpecCounters:
    """Mutable `SpecStats`: adding a round allocates no object."""

    __slots__ = (
        "_by_accepted",
        "emitted",
        "fallback_rounds",
        "fresh_accepted",
        "fresh_rounds",
        "hit_accepted",
        "hit_rounds",
        "look_ahead_rounds",
        "paused_rounds",
        "planned",
        "proposed",
        "rounds",
        "target_only",
    )

    def __init__(self) -> None:
        self.rounds = 0
        self.emitted = 0
        self.proposed = 0
        self.fallback_rounds = 0
        self.target_only = 0
        self.paused_rounds = 0
        self.look_ahead_rounds = 0
        self.hit_rounds = self.hit_accepted = 0
        self.fresh_rounds = self.fresh_accepted = 0
        self.planned = 0
        """What the planner had in force for the newest round."""
        self._by_accepted: list[int] = []
        """Rounds by the number of draft nodes that they accepted."""

    def add_round(self, *, emitted: int, flags: int, proposed: int, accepted: int) -> None:
        """Count one round; `flags` as in `SessionEvents`."""
        self.rounds += 1
        self.emitted += emitted
        if flags & FALLBACK:
            self.fallback_rounds += 1
        if flags & TARGET_ONLY:
            self.target_only += 1
        if flags & PAUSED:
            self.paused_rounds += 1
        if flags & LOOKED_AHEAD:
            self._add_ahead(flags, accepted)
        self.planned = flags & PLANNED
        if proposed:
            self.proposed += proposed
            missing = accepted + 1 - len(self._by_accepted)
            if missing > 0:
                self._by_accepted += [0] * missing
            self._by_accepted[accepted] += 1

    def _add_ahead(self, flags: int, accepted: int) -> None:
        self.look_ahead_rounds += 1
        if flags & LOOK_AHEAD_HIT:
            self.hit_rounds += 1
            self.hit_accepted += accepted
        elif not flags & FALLBACK:
            self.fresh_rounds += 1
            self.fresh_accepted += accepted

    def to_stats(self) -> SpecStats:
        """The counters now."""
        # A round that accepted d nodes accepted one at each depth up to d.
        reached = list(accumulate(reversed(self._by_accepted[1:])))
        per_depth = tuple(reversed(reached))
        return SpecStats(
            rounds=self.rounds,
            emitted=self.emitted,
            proposed=self.proposed,
            accepted=sum(per_depth),
            fallback_rounds=self.fallback_rounds,
            target_only_rounds=self.target_only,
            paused_rounds=self.paused_rounds,
            decision=describe_decision(self.planned),
            accepted_per_depth=per_depth,
            look_ahead_rounds=self.look_ahead_rounds,
            hit_rounds=self.hit_rounds,
            hit_accepted=self.hit_accepted,
            fresh_rounds=self.fresh_rounds,
            fresh_accepted=self.fresh_accepted,
            drafted_rounds=sum(self._by_accepted),
        )
