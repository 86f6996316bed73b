"""Trial preparation: sessions collect features until enough of them can speculate. Pure.

Sessions that can speculate keep features that others drop, which costs every round something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.speculation.measurements import RoundObservation

MIN_ELIGIBLE_SHARE: Final = 0.75
"""Share of the sessions that must be able to speculate for it to be tried."""
LOST_ELIGIBLE_SHARE: Final = 0.4
"""Share without which it is no longer."""
STILL_DUE_SHARE: Final = 0.8
"""Share of a trial's price that is enough once it is due: the price changes with what the last
rounds took."""
MAX_DUE_ROUNDS: Final = 256.0
"""Rounds for which a trial is due at most."""


@dataclass(slots=True)
class TrialPreparation:
    """State of the preparation for a trial of speculation, for one workload class at one load."""

    is_due: bool = False
    """Whether a trial is to be made as soon as enough sessions are able to speculate."""
    _rounds: float = 0.0

    @property
    def cost_share(self) -> float:
        """Share of the price that must be there."""
        return STILL_DUE_SHARE if self.is_due else 1.0

    def extend_wait(self, seen: RoundObservation) -> bool:
        """A trial could be paid for, with too few sessions; False: it was due for too long."""
        self._rounds += seen.rounds
        self.is_due = self._rounds < MAX_DUE_ROUNDS
        if not self.is_due:
            self._rounds = 0.0
        return self.is_due

    def cancel(self) -> None:
        """None is due any more."""
        self.is_due, self._rounds = False, 0.0
