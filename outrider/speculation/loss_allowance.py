"""What speculation has won over plain decoding, and so whether the next text begins with it (pure).

Texts differ in how many draft tokens stand, answers by half and more: one that is bad for drafts
says little of the next. So a session that is alone is judged by its own text, and whether the next
one begins with drafts is told by what all of them gave: by the plain rounds' time that speculation
has won and lost. It may spend what it has won, and a share of the time of plain rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from outrider.speculation.measurements import Emitted

MOST: Final = 48.0
"""Plain rounds beyond which what was won is forgotten: drafts that fail for good have so much to
lose."""
MOST_LOST: Final = 12.0
"""Plain rounds beyond which what was lost is forgotten."""
ANOTHER_TRY: Final = 3.0
"""Plain rounds that a text which is bad for drafts costs."""
GRANT: Final = 0.005
"""Share of the plain rounds that may be lost to see whether another text is better."""
FIRST_GRANT: Final = 0.015
"""The same after the first text that was bad, where another one may well be good enough; each that
follows halves it."""
SPREAD: Final = 1.65
"""By how much draft tokens of another text may stand more often: a deviation, as texts differ."""


@dataclass(slots=True)
class Winnings:
    """Of one kind of session at one load."""

    _rounds: float = 0.0
    """Plain rounds' time that speculation has won; negative: lost."""
    _grant: float = GRANT
    _lost: int = 0
    """Texts in a row that were left since it had won enough for another try."""

    @classmethod
    def beside(cls, other: Winnings, *, plain: bool) -> Winnings:
        """Those at a load at which nothing was won yet, by those at the nearest; `plain`: whether
        it begins with plain decoding, which nobody has found to be wrong."""
        rounds = min(other._rounds, -ANOTHER_TRY) if plain else other._rounds
        return cls(rounds, other._grant, other._lost)

    @property
    def spendable(self) -> bool:
        """Whether there is anything to spend on another text."""
        return self._rounds > 0.0

    def add(self, rounds: float) -> None:
        """Speculation has won so many plain rounds' time; negative: lost, nan: nobody knows."""
        if math.isnan(rounds):
            return
        self._rounds = min(max(self._rounds + rounds, -MOST_LOST), MOST)
        if self._rounds > ANOTHER_TRY:
            self._lost = 0

    def decoded_plainly(self, rounds: float) -> None:
        """So many plain rounds were run, no trials of them."""
        if not self.spendable:
            self.add(self._grant * rounds)

    def gave_up(self, emitted: Emitted, needed: float) -> None:
        """Speculation was left: rows emitted this on a text, of `needed` tokens each."""
        self._lost += 1
        likely = 1.0 + SPREAD * (emitted.mean + math.sqrt(emitted.variance) - 1.0)
        self._grant = GRANT
        if likely > needed:
            self._grant = max(GRANT, FIRST_GRANT * 0.5 ** (self._lost - 1))

    def renew(self) -> None:
        """Drafts are made another way from now on: what was lost tells nothing of it."""
        self._rounds, self._grant, self._lost = max(self._rounds, 0.0), GRANT, 0
