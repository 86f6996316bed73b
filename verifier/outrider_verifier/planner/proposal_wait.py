"""Computes how long a session waits for its proposal, and when its drafter counts as stalled. Pure.

A session waits for the time within which nearly every proposal arrives. If a proposal does not
arrive within this time, the drafter counts as stalled: the session's next rounds do not wait. The
session waits again after a proposal has arrived, or after a number of rounds that doubles with each
further timeout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from outrider_verifier.state.session import Session

MEAN_WEIGHT: Final = 1.0 / 8.0
DEVIATION_WEIGHT: Final = 1.0 / 4.0
LONGEST_WEIGHT: Final = 1.0 / 64.0
TIMEOUT_DEVIATIONS: Final = 6.0
"""Number of mean deviations above the mean delay within which nearly every proposal is assumed to
arrive."""
MIN_WAIT_ROUNDS: Final = 2.0
"""Minimum proposal timeout, as a number of rounds."""
STALLED_ROUNDS: Final = 16
MAX_STALLED_ROUNDS: Final = 256
"""Maximum number of rounds after which a session waits again for a stalled drafter. The number is
`STALLED_ROUNDS` after the first timeout, and doubles with each further one."""


class ArrivalEstimate:
    """Moving estimate of the delay, in seconds, between the time when a session's root becomes
    known and the arrival of the proposal for it."""

    def __init__(self) -> None:
        self._mean_s = math.nan
        self._deviation_s = self._longest_s = 0.0

    def observe_arrival(self, delay_s: float) -> None:
        """Record that a proposal arrived `delay_s` seconds after its root was known. Negative
        delays count as 0."""
        delay_s = max(0.0, delay_s)
        self._longest_s += LONGEST_WEIGHT * (self.mean_s - self._longest_s)
        self._longest_s = max(self._longest_s, delay_s)
        if math.isnan(self._mean_s):
            self._mean_s, self._deviation_s = delay_s, delay_s / 2.0
            return
        off = delay_s - self._mean_s
        self._mean_s += MEAN_WEIGHT * off
        self._deviation_s += DEVIATION_WEIGHT * (abs(off) - self._deviation_s)

    @property
    def mean_s(self) -> float:
        """Mean delay in seconds; 0 if unknown."""
        return 0.0 if math.isnan(self._mean_s) else self._mean_s

    @property
    def latest_s(self) -> float:
        """Delay, in seconds, within which nearly every proposal arrives; infinite if unknown. It is
        at least the longest recent delay: look-ahead makes most delays very short, so the mean and
        the deviation alone would cut off the other proposals."""
        if math.isnan(self._mean_s):
            return math.inf
        return max(self._mean_s + TIMEOUT_DEVIATIONS * self._deviation_s, self._longest_s)


def proposal_timeout_s(
    arrival: ArrivalEstimate, round_s: float, *, bound_s: float, ceiling_s: float
) -> float:
    """Return how long a row waits for its proposal, in seconds.

    The result is the time within which nearly every proposal arrives, plus the time of one round.
    It is at least two rounds, at most max(`ceiling_s`, two rounds), and at most `bound_s`, the
    plan's proposal timeout. A shorter wait loses drafts; a longer wait wastes time if the drafter
    has stopped.
    """
    min_wait_s = MIN_WAIT_ROUNDS * round_s
    wanted_s = max(arrival.latest_s + round_s, min_wait_s)
    return min(wanted_s, max(ceiling_s, min_wait_s), bound_s)


@dataclass(slots=True, eq=False)
class ProposalWait:
    """State that decides how long one session waits for proposals, from the arrival times of its
    drafter's proposals."""

    is_catching_up: bool = True
    """Whether the session waits for the maximum time, because its drafter still has to process the
    prompt or the tokens that it missed."""
    is_silent: bool = False
    """Whether the drafter currently sends nothing to any session. If so, the session waits for the
    drafter again only after the next message from it."""
    missed_prefix_len: int = -1
    """Length, in tokens, of the prefix whose proposal timed out last; -1 if none has."""
    rounds_without_proposal: int = 0
    """Number of rounds since the last timeout that ran without waiting for a proposal."""
    _missed_at: float = 0.0
    _stalled_rounds: int = field(default=STALLED_ROUNDS)

    def record_arrival(
        self,
        session: Session,
        arrival: ArrivalEstimate,
        *,
        prefix_len: int,
        usable: bool,
        now: float,
    ) -> None:
        """Record the arrival of a proposal for a prefix of `prefix_len` tokens. `usable` is whether
        this is the session's present prefix. `arrival` is the estimate that the measured delay is
        added to."""
        if usable:
            # The first proposal after a pause or a timeout measures only how long catching up
            # takes.
            if not self.is_catching_up:
                arrival.observe_arrival(now - session.root_known_at)
            self.record_healthy()
        elif prefix_len == self.missed_prefix_len:
            arrival.observe_arrival(now - self._missed_at)
            # The proposal was late. Wait for the next one, or the drafter never catches up with
            # rounds that do not wait.
            self.is_catching_up = True

    def record_healthy(self) -> None:
        """Record that the drafter keeps up with the session."""
        self.is_catching_up, self._stalled_rounds = False, STALLED_ROUNDS

    def record_timeout(self, session: Session) -> None:
        """Record that the session's proposal did not arrive in time."""
        self.missed_prefix_len, self._missed_at = session.length, session.root_known_at
        self.rounds_without_proposal, self.is_catching_up = 0, True

    def record_skipped_round(self, session: Session) -> None:
        """Record a round without a proposal. If the drafter counts as stalled, the round did not
        wait, and after enough such rounds the session waits again."""
        if not session.has_stalled_drafter:
            return
        self.rounds_without_proposal += 1
        if self.rounds_without_proposal >= self._stalled_rounds and not self.is_silent:
            # The drafter received every verdict, so a healthy drafter needs no longer than usual.
            session.has_stalled_drafter = self.is_catching_up = False
            self.rounds_without_proposal = 0
            self._stalled_rounds = min(2 * self._stalled_rounds, MAX_STALLED_ROUNDS)
