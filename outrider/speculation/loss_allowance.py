"""Loss allowance of speculation: plain rounds won so far, to be spent on further texts. Pure.

Acceptance differs between texts by half and more: one that is bad for drafts says little about the
next. So a session that is alone is judged by its own text, and the results of all texts decide
whether the next one begins with drafts: the plain rounds' time that speculation has won and lost.
It may spend what it has won, and a share of the time of plain rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from outrider.speculation.measurements import EmissionStats

MAX_GAIN_ROUNDS: Final = 48.0
"""Plain rounds beyond which what was won is forgotten: drafts that fail for good have so much to
lose."""
MAX_LOSS_ROUNDS: Final = 12.0
"""Plain rounds beyond which what was lost is forgotten."""
RETRY_COST_ROUNDS: Final = 3.0
"""Plain rounds that a text which is bad for drafts costs."""
LOSS_GRANT_SHARE: Final = 0.005
"""Share of the plain rounds that may be lost to see whether another text is better."""
FIRST_LOSS_GRANT_SHARE: Final = 0.015
"""The same after the first text that was bad, where another one may well be good enough; each that
follows halves it."""
TEXT_DEVIATION: Final = 1.65
"""By how much draft tokens of another text may stand more often: a deviation, as texts differ."""


@dataclass(slots=True)
class SessionGains:
    """Net gain of speculation for one workload class at one load, in plain rounds."""

    _rounds: float = 0.0
    """Plain rounds' time that speculation has won; negative: lost."""
    _grant: float = LOSS_GRANT_SHARE
    _lost: int = 0
    """Texts in a row that were left since it had won enough for another try."""

    @classmethod
    def from_other_load(cls, other: SessionGains, *, plain: bool) -> SessionGains:
        """Those at a load at which nothing was won yet, by those at the nearest; `plain`: whether
        it begins with plain decoding, which nobody has found to be wrong."""
        rounds = min(other._rounds, -RETRY_COST_ROUNDS) if plain else other._rounds
        return cls(rounds, other._grant, other._lost)

    @property
    def can_spend(self) -> bool:
        """Whether there is anything to spend on another text."""
        return self._rounds > 0.0

    def add_rounds(self, rounds: float) -> None:
        """Speculation has won so many plain rounds' time; negative: lost, nan: nobody knows."""
        if math.isnan(rounds):
            return
        self._rounds = min(max(self._rounds + rounds, -MAX_LOSS_ROUNDS), MAX_GAIN_ROUNDS)
        if self._rounds > RETRY_COST_ROUNDS:
            self._lost = 0

    def add_plain_rounds(self, rounds: float) -> None:
        """So many plain rounds were run, no trials of them."""
        if not self.can_spend:
            self.add_rounds(self._grant * rounds)

    def record_failure(self, emitted: EmissionStats, needed: float) -> None:
        """Speculation was left: rows emitted this on a text, of `needed` tokens each."""
        self._lost += 1
        likely = 1.0 + TEXT_DEVIATION * (emitted.mean + math.sqrt(emitted.variance) - 1.0)
        self._grant = LOSS_GRANT_SHARE
        if likely > needed:
            self._grant = max(LOSS_GRANT_SHARE, FIRST_LOSS_GRANT_SHARE * 0.5 ** (self._lost - 1))

    def reset(self) -> None:
        """Drafts are made another way from now on: what was lost tells nothing of it."""
        self._rounds, self._grant, self._lost = max(self._rounds, 0.0), LOSS_GRANT_SHARE, 0
