"""By how much speculation has fallen behind plain decoding since it was last ahead (pure).

Sums tell a slow decline and a sudden one apart from bad luck sooner than a mean does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.speculation.measurements import SURE, Emitted, RoundTimes, Seen

LIMIT: Final = 3.0
PROVEN_LIMIT: Final = 12.0
"""Plain rounds that speculation may fall behind, since it was last ahead, before it is doubted."""
MOST: Final = 2.0 * PROVEN_LIMIT
"""Plain rounds that it counts as behind at most: a stall may not weigh on all that follow it."""
LEAST_ROUNDS: Final = 1.9
"""Rounds of speculation without which it is not judged."""


@dataclass(slots=True)
class Behind:
    """What was seen since then."""

    emitted: Emitted = field(default_factory=Emitted)
    times: RoundTimes = field(default_factory=RoundTimes)
    """Of the rounds whose seconds tell anything."""
    deficit: float = 0.0
    """Plain rounds that were lost."""

    def observe(self, seen: Seen) -> None:
        """A round with drafts."""
        self.emitted.see(seen)
        if seen.timed:
            self.times.observe(seen.round_s, seen.rounds)

    def lose(self, rounds: float) -> bool:
        """It lost so many plain rounds, negative: won; whether it is still behind."""
        self.deficit = min(self.deficit + rounds, MOST)
        return self.deficit > 0.0

    def doubtful(self, plain_s: float, *, proven: bool) -> bool:
        """Whether it has lost too much, and that is no bad luck; `proven`: whether it was well
        ahead once."""
        if self.deficit <= (PROVEN_LIMIT if proven else LIMIT):
            return False
        return self.times.rounds > LEAST_ROUNDS and self.short_of(plain_s)

    def short_of(self, plain_s: float, *, sure: float = SURE) -> bool:
        """Whether too few tokens were emitted for the time, by so many standard errors."""
        return self.emitted.short_of(self.needed(plain_s), sure=sure)

    def needed(self, plain_s: float) -> float:
        """Tokens that a row must emit to be worth such rounds."""
        return self.times.mean_s / plain_s
