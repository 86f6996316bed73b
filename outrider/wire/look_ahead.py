"""How well drafts made ahead of verdicts did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAheadStats:
    """Counters of session rounds with look-ahead, cumulative."""

    rounds: int = 0
    """That used a proposal, or wanted one in vain."""
    hits: int = 0
    """Of these, rounds whose proposal had come before its prefix did."""
    hit_accepted: int = 0
    """Draft nodes accepted in them."""
    fresh: int = 0
    """Of the rounds, those whose proposal was made for a prefix that was there."""
    fresh_accepted: int = 0
    """Draft nodes accepted in them."""

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None without rounds."""
        return self.hits / self.rounds if self.rounds else None

    @property
    def stale_accepted_len(self) -> float | None:
        """Mean accepted nodes of a hit: what was drafted from a draft's own features."""
        return self.hit_accepted / self.hits if self.hits else None

    @property
    def fresh_accepted_len(self) -> float | None:
        """Mean accepted nodes of a proposal that was drafted from real features."""
        return self.fresh_accepted / self.fresh if self.fresh else None


NO_LOOK_AHEAD: Final = LookAheadStats()
