"""Which rounds the planner looks at while all sessions decode plainly, in short rounds (pure).

What such a round gives is known, and hardly changes; but looking at every one took the host a
thirtieth of a small model's rounds. So it looks at one in `SAMPLE_INTERVAL_ROUNDS`, which stands
for those before it, and notes where that begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SAMPLE_INTERVAL_ROUNDS: Final = 8
"""Rounds of which one is looked at."""


@dataclass(slots=True)
class PlainRoundSelector:
    """Asked once a round, in turn."""

    _passed: int = 0
    """Rounds since the last one that was looked at."""
    marks_end: bool = True
    """Whether the end of the last round is noted, where the next one begins."""

    def weight_of_round(self, *, calm: bool) -> int:
        """A round ended: for how many it stands, itself included. 0: it is not looked at; `notes`
        says whether its end is to be noted. `calm`: whether not every round is."""
        if calm and self._passed < SAMPLE_INTERVAL_ROUNDS - 2:
            self._passed, self.marks_end = self._passed + 1, False
            return 0
        if not self.marks_end:
            # When it began nobody knows.
            self._passed, self.marks_end = self._passed + 1, True
            return 0
        stands_for, self._passed = self._passed + 1, 0
        return stands_for
