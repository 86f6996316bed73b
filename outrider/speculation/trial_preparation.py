"""How long sessions gather for a trial of speculation, where few are able to speculate (pure).

Those that are keep what others do without, which costs every round something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.speculation.measurements import Seen

ABLE: Final = 0.75
"""Share of the sessions that must be able to speculate for it to be tried."""
LEAST_ABLE: Final = 0.4
"""Share without which it is no longer."""
STILL_DUE: Final = 0.8
"""Share of a trial's price that is enough once it is due: the price changes with what the last
rounds took."""
MOST_ROUNDS: Final = 256.0
"""Rounds for which a trial is due at most."""


@dataclass(slots=True)
class Gathering:
    """Of one kind of session at one load."""

    due: bool = False
    """Whether a trial is to be made as soon as enough sessions are able to speculate."""
    _rounds: float = 0.0

    @property
    def share(self) -> float:
        """Share of the price that must be there."""
        return STILL_DUE if self.due else 1.0

    def wait(self, seen: Seen) -> bool:
        """A trial could be paid for, with too few sessions; False: it was due for too long."""
        self._rounds += seen.rounds
        self.due = self._rounds < MOST_ROUNDS
        if not self.due:
            self._rounds = 0.0
        return self.due

    def end(self) -> None:
        """None is due any more."""
        self.due, self._rounds = False, 0.0
