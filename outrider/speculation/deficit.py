"""Deficit of speculation against plain decoding since it was last ahead. Pure.

Sums distinguish slow and sudden declines from bad luck sooner than a mean does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.speculation.measurements import (
    MIN_STD_ERRORS,
    EmissionStats,
    RoundObservation,
    RoundTimeWindow,
)

MAX_DEFICIT_ROUNDS: Final = 3.0
MAX_PROVEN_DEFICIT_ROUNDS: Final = 12.0
"""Plain rounds that speculation may fall behind, since it was last ahead, before it is doubted."""
MAX_COUNTED_ROUNDS: Final = 2.0 * MAX_PROVEN_DEFICIT_ROUNDS
"""Plain rounds that it counts as behind at most: a stall may not weigh on all that follow it."""
MIN_JUDGED_ROUNDS: Final = 1.9
"""Rounds of speculation without which it is not judged."""


@dataclass(slots=True)
class SpeculationDeficit:
    """Rounds observed since speculation was last ahead of plain decoding, and what they lost."""

    emitted: EmissionStats = field(default_factory=EmissionStats)
    times: RoundTimeWindow = field(default_factory=RoundTimeWindow)
    """Of the rounds whose seconds tell anything."""
    deficit: float = 0.0
    """Plain rounds that were lost."""

    def observe_round(self, seen: RoundObservation) -> None:
        """A round with drafts."""
        self.emitted.add_observation(seen)
        if seen.is_timed:
            self.times.observe_round(seen.round_s, seen.rounds)

    def add_loss(self, rounds: float) -> bool:
        """It lost so many plain rounds, negative: won; whether it is still behind."""
        self.deficit = min(self.deficit + rounds, MAX_COUNTED_ROUNDS)
        return self.deficit > 0.0

    def is_uncertain(self, plain_s: float, *, proven: bool) -> bool:
        """Whether it has lost too much, and that is no bad luck; `proven`: whether it was well
        ahead once."""
        if self.deficit <= (MAX_PROVEN_DEFICIT_ROUNDS if proven else MAX_DEFICIT_ROUNDS):
            return False
        return self.times.rounds > MIN_JUDGED_ROUNDS and self.is_below(plain_s)

    def is_below(self, plain_s: float, *, sure: float = MIN_STD_ERRORS) -> bool:
        """Whether too few tokens were emitted for the time, by so many standard errors."""
        return self.emitted.is_below(self.needed_tokens(plain_s), sure=sure)

    def needed_tokens(self, plain_s: float) -> float:
        """Tokens that a row must emit to be worth such rounds."""
        return self.times.mean_s / plain_s
