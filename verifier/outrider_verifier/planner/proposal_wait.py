"""How long a session waits for its proposal, and when a drafter counts as stalled. Pure.

A row waits as long as nearly every proposal takes. After a timeout its rounds go on without waiting
until a proposal arrives, or for a number of rounds that doubles each time that waiting once
more was in vain.
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
"""Mean deviations above the mean within which nearly every proposal arrives."""
MIN_WAIT_ROUNDS: Final = 2.0
"""Rounds that a row waits for its proposal in any case."""
STALLED_ROUNDS: Final = 16
MAX_STALLED_ROUNDS: Final = 256
"""Rounds without a wait after which a stalled drafter is waited for once more; doubles up to the
second number."""


class ArrivalEstimate:
    """Delay from a known root to its proposal's arrival: mean and mean deviation, in seconds."""

    def __init__(self) -> None:
        self._mean_s = math.nan
        self._deviation_s = self._longest_s = 0.0

    def observe_arrival(self, delay_s: float) -> None:
        """A proposal arrived `delay_s` after its root was known; early ones count as 0."""
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
        """Mean delay; 0 while nothing is known."""
        return 0.0 if math.isnan(self._mean_s) else self._mean_s

    @property
    def latest_s(self) -> float:
        """The delay within which nearly every proposal arrives; infinite while unknown. The longest
        delay of late counts too: proposals that were drafted ahead arrive much earlier than the
        others."""
        if math.isnan(self._mean_s):
            return math.inf
        return max(self._mean_s + TIMEOUT_DEVIATIONS * self._deviation_s, self._longest_s)


def proposal_timeout_s(
    arrival: ArrivalEstimate, round_s: float, *, bound_s: float, ceiling_s: float
) -> float:
    """Return how long a row waits for its proposal, in seconds.

    That is the time within which nearly every proposal arrives plus one round, at least two rounds,
    at most max(`ceiling_s`, two rounds), and at most `bound_s`, the plan's. A shorter wait loses
    drafts; a longer wait loses time when the drafter has stopped.
    """
    min_wait_s = MIN_WAIT_ROUNDS * round_s
    wanted_s = max(arrival.latest_s + round_s, min_wait_s)
    return min(wanted_s, max(ceiling_s, min_wait_s), bound_s)


@dataclass(slots=True, eq=False)
class ProposalWait:
    """What one session has seen of its drafter's punctuality."""

    is_catching_up: bool = True
    """Whether the drafter is given the longest time: it has to read the prompt, or what it
    missed."""
    is_silent: bool = False
    """Whether the drafter sends nothing to any session. Sessions then do not try it again; its next
    message ends the silence."""
    missed_prefix_len: int = -1
    """Length of the prefix whose proposal did not come in time; -1: none."""
    rounds_without_proposal: int = 0
    """Rounds since the stall that did not wait for a proposal."""
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
        """A proposal for a prefix of this length came; `usable`: it is for the present one."""
        if usable:
            # The first one after a pause or a timeout tells how long catching up takes.
            if not self.is_catching_up:
                arrival.observe_arrival(now - session.root_known_at)
            self.record_healthy()
        elif prefix_len == self.missed_prefix_len:
            arrival.observe_arrival(now - self._missed_at)
            # It was late. Wait for it once, or plain rounds outrun it for good.
            self.is_catching_up = True

    def record_healthy(self) -> None:
        """The drafter follows."""
        self.is_catching_up, self._stalled_rounds = False, STALLED_ROUNDS

    def record_timeout(self, session: Session) -> None:
        """The proposal did not come in time."""
        self.missed_prefix_len, self._missed_at = session.length, session.root_known_at
        self.rounds_without_proposal, self.is_catching_up = 0, True

    def record_skipped_round(self, session: Session) -> None:
        """A round did not wait, if the drafter is stalled."""
        if not session.has_stalled_drafter:
            return
        self.rounds_without_proposal += 1
        if self.rounds_without_proposal >= self._stalled_rounds and not self.is_silent:
            # The drafter received every verdict: once it is well again it needs no longer than
            # usual.
            session.has_stalled_drafter = self.is_catching_up = False
            self.rounds_without_proposal = 0
            self._stalled_rounds = min(2 * self._stalled_rounds, MAX_STALLED_ROUNDS)
