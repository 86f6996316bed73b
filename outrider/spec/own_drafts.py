"""Whether drafts of a head in the verifier's own process pay, at one load (pure).

Such a head follows a session from its prompt on: once a session has decoded plainly its drafts are
gone for good, so nothing can be probed. What can be known without: how many tokens a round emits,
how long it takes, and how long the device was measured to take for the same round with and without
drafts. The host's share is the same for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from outrider.spec.contest import OUTLIER, Mode, Rate

SOLID_ROUNDS: Final = 32.0
"""Rounds before drafts may be given up."""
SOLID_ROWS: Final = 128
"""Rows of these rounds: with few sessions more of them are needed."""
CLEAN_ROUNDS: Final = 16.0
"""Rounds of these that tell of times."""
LEAST_GAIN: Final = 0.97
"""Speed relative to plain decoding below which drafts are given up."""
FIRST_HOLD_S: Final = 30.0
LONGEST_HOLD_S: Final = 1800.0
"""How long sessions begin without drafts; doubles each time that drafts are given up again."""


@dataclass(slots=True)
class OwnDrafts:
    """The mode in which sessions of a verifier with a head of its own begin."""

    _stood: Rate = field(default_factory=Rate)
    """Tokens of one row a round."""
    _took: Rate = field(default_factory=Rate)
    """Seconds of rounds in which nothing else took part."""
    _rows: int = 0
    _gain: float = math.nan
    _until: float = -math.inf
    _hold_s: float = FIRST_HOLD_S

    @property
    def gain(self) -> float:
        """Speed relative to plain decoding; nan while it is not known."""
        return self._gain

    def mode(self, now: float) -> Mode:
        """How sessions are to decode; a verdict for plain decoding holds for a while."""
        return Mode.PLAIN if now < self._until else Mode.SPECULATE

    def observe(
        self,
        tokens: int,
        rows: int,
        seconds: float | None,
        *,
        plain_s: float | None,
        own_s: float | None,
        now: float,
    ) -> None:
        """In a round `rows` sessions verified own drafts and emitted `tokens`.

        seconds: what it took; None if it had prompts or plain rows too, which tell nothing of
        times. plain_s, own_s: what the device takes for so many rows without and with drafts;
        None: not known, and then nothing is concluded.
        """
        if rows < 1 or not plain_s or not own_s:
            return
        stood, took = self._stood, self._took
        stood.observe(tokens / rows, 0.0, 1.0)
        self._rows += rows
        if seconds is not None and seconds > 0.0:
            # One stalled round says nothing of drafts.
            took.observe(0.0, min(seconds, OUTLIER * took.round_s), 1.0)
        if took.rounds < CLEAN_ROUNDS:
            return
        host_s = max(0.0, took.round_s - own_s)
        self._gain = stood.tokens / stood.rounds * (plain_s + host_s) / (own_s + host_s)
        if stood.rounds < SOLID_ROUNDS or self._rows < SOLID_ROWS or now < self._until:
            return
        if self._gain >= LEAST_GAIN:
            self._hold_s = FIRST_HOLD_S
            return
        self._until = now + self._hold_s
        self._hold_s = min(2.0 * self._hold_s, LONGEST_HOLD_S)
        self._stood, self._took, self._rows = Rate(), Rate(), 0
