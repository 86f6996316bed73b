"""Acceptance under look-ahead relative to lock-step, estimated on the same text. Pure.

Acceptance differs between texts by half and more, so the tokens that the current text emits in one
mode say nothing beside those of many texts in the other. So rounds are compared in pairs: those of
one mode with their neighbours of the other, before and after. The effect of the text cancels out,
and what remains is the cost of older features, which changes slowly if at all: many pairs estimate
it, and until there are some, a prior from measured draft heads holds.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from outrider.speculation.measurements import EmissionStats, RoundObservation

PRIOR_STALE_SHARE: Final = 0.95
PRIOR_STALE_DEVIATION: Final = 0.08
"""What a row emits under look-ahead over lock-step, as heads were seen to do it: some drafts are
made from features of a round ago."""
MIN_DEVIATION: Final = 0.015
"""How uncertain it stays after however many pairs: drafts may change."""
NEIGHBOUR_ROUNDS: Final = 16.0
"""Rounds after which one before a change of way counts half, and rounds after the last change with
which a pair is complete."""
TEXT_DRIFT: Final = 0.07
"""Deviation of what one text gives, from some rounds to their neighbours."""


class LogRatioEstimate(NamedTuple):
    """Log ratio of the tokens per row under look-ahead to those in lock-step."""

    log: float
    """Its natural logarithm."""
    variance: float
    """Of that."""


class LookAheadAcceptance:
    """Ratio of tokens per row under look-ahead to lock-step, for one workload class; rows without a
    draft do not count."""

    def __init__(self) -> None:
        self._log, self._variance = math.log(PRIOR_STALE_SHARE), PRIOR_STALE_DEVIATION**2
        self._near = {False: EmissionStats(), True: EmissionStats()}
        """Rows of the pair under way, by whether they were of look-ahead."""
        self._ahead = False
        """What the last row was."""
        self._since = 0.0
        """Rounds since the last change of way."""
        self._sessions = 1

    def estimate(self) -> LogRatioEstimate:
        """What is known by now."""
        stale, fresh = self._near[True], self._near[False]
        if not (stale.rows and fresh.rows):
            return LogRatioEstimate(self._log, self._variance)
        noise = TEXT_DRIFT**2 / self._sessions
        noise += stale.variance / stale.mean**2 + fresh.variance / fresh.mean**2
        weight = self._variance / (self._variance + noise)
        seen = math.log(stale.mean / fresh.mean)
        log = self._log + weight * (seen - self._log)
        return LogRatioEstimate(log, (1.0 - weight) * self._variance)

    def observe_rows(self, seen: RoundObservation, *, ahead: bool) -> None:
        """Rows with drafts, of sessions that had gone over to this way before."""
        if ahead is not self._ahead:
            self._ahead, self._since = ahead, 0.0
        mine, other = self._near[ahead], self._near[not ahead]
        if not other.rows:
            mine.decay(seen.rounds / NEIGHBOUR_ROUNDS)
        mine.add_observation(seen)
        self._since += seen.rounds
        self._sessions = max(1, seen.sessions)
        if other.rows and self._since >= NEIGHBOUR_ROUNDS:
            self._complete()

    def begin_session(self, sessions: int) -> None:
        """Another text begins, of so many that share their rounds: what came before it is no
        neighbour of what follows."""
        if sessions <= 1:
            self._complete()
            return
        for rows in self._near.values():
            rows.decay(-math.log2(1.0 - 1.0 / sessions))

    def _complete(self) -> None:
        self._log, variance = self.estimate()
        self._variance = max(variance, MIN_DEVIATION**2)
        self._near = {False: EmissionStats(), True: EmissionStats()}
