"""Mode probe: a few rounds in the mode that is not in force, to measure it. Pure.

Its loss is bounded, that of the mode change itself aside: it is broken off when it has lost too
much, and extended while it loses next to nothing, because few rounds tell little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.measurements import OUTLIER_FACTOR, RoundObservation

RECHECK_PROBE_ROUNDS: Final = 6.0
LONG_RECHECK_PROBE_ROUNDS: Final = 16.0
"""Plain rounds that are compared with speculation before it is left, and what they are extended
to; as for one with drafts, below."""
PROBE_ROUNDS: Final = 6.0
LONG_PROBE_ROUNDS: Final = 24.0
FIRST_PLAIN_ROUNDS: Final = 3.0
"""Plain rounds of a probe where none was ever run."""
MIN_SETTLED_SHARE: Final = 0.5
"""Share of the rounds that must tell of the mode for the others to count, too: a few sessions that
began in it are not the many that come to it."""
SMALL_LOSS_ROUNDS: Final = 1.5
"""Plain rounds that are next to nothing."""
MAX_LOSS_ROUNDS: Final = 6.0
"""Rounds of the mode in force that a probe may lose before it is broken off. What the change itself
took is lost by then, and would be again with the next one: it is no reason to learn nothing."""


@dataclass(slots=True)
class ModeProbe:
    """A probe in progress. `usual_s`, below: seconds of a round in the mode in force, nan if that
    is unknown."""

    mode: DecodingMode
    rounds_left: float
    is_recheck: bool = False
    """Whether speculation is left if plain rounds turn out faster; else they are but refreshed."""
    lost_s: float = 0.0
    _steady_s: float = 0.0
    """The same but for the change itself."""
    _settled: float = 0.0
    _rounds: float = 0.0
    """Rounds that told of the mode and not of the change to it, and all of them."""

    def add_loss(self, seen: RoundObservation, usual_s: float, worth: float) -> None:
        """A round, `seen`, took longer than it was worth; `worth`: tokens that a row emits in one
        of the mode in force."""
        if usual_s > 0.0:
            lost = seen.rounds * (seen.round_s - seen.tokens / seen.rows / worth * usual_s)
            self.lost_s += lost
            # One that was held up says nothing of the mode.
            self._steady_s += (
                min(lost, OUTLIER_FACTOR * seen.rounds * usual_s) * seen.is_load_steady
            )

    def count_round(self, seen: RoundObservation) -> bool:
        """Count a round; whether it tells of the mode, as most do not at first while they tell of
        the change to it. Later such ones are a mode's that sessions come to all the time."""
        self._rounds += seen.rounds
        self._settled += seen.rounds * seen.is_load_steady
        counted = seen.is_load_steady or self._settled > MIN_SETTLED_SHARE * self._rounds
        self.rounds_left -= seen.rounds * counted
        return counted

    def is_too_expensive(self, usual_s: float) -> bool:
        """Whether it has lost too much."""
        return self._steady_s / usual_s > MAX_LOSS_ROUNDS

    @property
    def has_won(self) -> bool:
        """Whether it has lasted long enough, and gained by it."""
        return self.rounds_left <= 0.0 and self._steady_s < 0.0

    def is_over(self, usual_s: float) -> bool:
        """Whether enough rounds were run."""
        longer = LONG_PROBE_ROUNDS - PROBE_ROUNDS
        if self.mode is DecodingMode.PLAIN:
            longer = LONG_RECHECK_PROBE_ROUNDS - RECHECK_PROBE_ROUNDS
        cheap = self._steady_s / usual_s < SMALL_LOSS_ROUNDS
        return self.rounds_left <= (-longer if cheap else 0.0)
