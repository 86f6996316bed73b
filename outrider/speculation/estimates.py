"""Estimates of draft acceptance by depth, and of proposal arrival times. Pure.

Estimates are weighted exponentially: old observations count less with each new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.spec.plan import MAX_DRAFT_TOKENS

HALF_LIFE_ROUNDS: Final = 32.0
"""Rounds after which an observation of acceptance counts half."""
PRIOR_ROUNDS: Final = 6.0
"""Rounds of its own after which a session's estimate counts as much as the one it began with."""
PRIOR_RATE: Final = 0.7
"""Conditional acceptance of a depth nobody has tried."""
_MEAN_GAIN: Final = 1.0 / 8.0
_DEVIATION_GAIN: Final = 1.0 / 4.0
TIMEOUT_STD_DEVIATIONS: Final = 6.0
"""Mean deviations above the mean that hold nearly every arrival."""
_LONGEST_GAIN: Final = 1.0 / 64.0
MIN_WAIT_ROUNDS: Final = 2.0
"""A row waits for its proposal for so many rounds, however long these are."""


class AcceptanceEstimate:
    """P(a draft token of depth d is accepted, given that its parent was), d = 1 .. D.

    A session's estimate begins at that of its kind (`prior`): it reads the prior where its own
    evidence is thin, and so follows it until it knows better.
    """

    def __init__(self, prior: AcceptanceEstimate | None = None) -> None:
        self._prior = prior
        self._stood = np.zeros(0)
        self._tried = np.zeros(0)
        # Every round of every session observes, estimates are read now and then: so rounds are
        # counted in plain lists, and weighted and passed on when somebody asks.
        self._new_stood: list[int] = []
        self._new_tried: list[int] = []

    def observe_round(self, depth: int, accepted_len: int) -> None:
        """A round verified a draft of `depth` levels (>= 1), `accepted_len` of which stood."""
        depth = min(depth, MAX_DRAFT_TOKENS)
        accepted_len = min(accepted_len, depth)
        # What lies behind the first rejection was not tried.
        tried = min(accepted_len + 1, depth)
        if tried > len(self._new_tried):
            missing = [0] * (tried - len(self._new_tried))
            self._new_tried += missing
            self._new_stood += missing
        for level in range(tried):
            self._new_tried[level] += 1
        for level in range(accepted_len):
            self._new_stood[level] += 1

    def share_with_prior(self) -> None:
        """Weigh what is new against what is old, and let the prior have it too."""
        levels = len(self._new_tried)
        if not levels:
            return
        if self._prior is not None:
            self._prior.add_rounds(self._new_tried, self._new_stood)
        if levels > len(self._tried):
            grow = (0, levels - len(self._tried))
            self._stood, self._tried = np.pad(self._stood, grow), np.pad(self._tried, grow)
        tried = np.asarray(self._new_tried, dtype=np.float64)
        keep = 0.5 ** (tried / HALF_LIFE_ROUNDS)
        # The newest round counts fully and each one before it a little less: on average so much.
        weight = (1.0 - keep) / (np.maximum(tried, 1.0) * (1.0 - 0.5 ** (1.0 / HALF_LIFE_ROUNDS)))
        self._tried[:levels] = keep * self._tried[:levels] + weight * tried
        stood = np.asarray(self._new_stood, dtype=np.float64)
        self._stood[:levels] = keep * self._stood[:levels] + weight * stood
        self._new_tried, self._new_stood = [], []

    def add_rounds(self, tried: Sequence[int], stood: Sequence[int]) -> None:
        """Several rounds at once: how often each depth was tried, and how often it stood."""
        missing = [0] * max(0, len(tried) - len(self._new_tried))
        self._new_tried += missing
        self._new_stood += missing
        for level, (more_tried, more_stood) in enumerate(zip(tried, stood, strict=True)):
            self._new_tried[level] += more_tried
            self._new_stood[level] += more_stood

    def rates(self, depth: int) -> NDArray[np.float64]:
        """float64 [depth]: conditional acceptance by depth, in (0, 1)."""
        self.share_with_prior()
        prior = self._prior
        base = np.full(depth, PRIOR_RATE) if prior is None else prior.rates(depth)
        known = min(depth, len(self._tried))
        if known:
            weight = self._tried[:known] + PRIOR_ROUNDS
            base[:known] = (self._stood[:known] + PRIOR_ROUNDS * base[:known]) / weight
        return base

    def acceptance_by_depth(self, depth: int) -> NDArray[np.float64]:
        """float64 [depth]: P(the token of depth d stands); their sum, plus one, is the number of
        tokens that a round is expected to emit."""
        reached: NDArray[np.float64] = np.cumprod(self.rates(depth), dtype=np.float64)
        return reached


class ArrivalEstimate:
    """Delay from a known root to its proposal's arrival: mean and mean deviation, seconds."""

    def __init__(self) -> None:
        self._mean = math.nan
        self._deviation = 0.0
        self._longest = 0.0

    @property
    def has_data(self) -> bool:
        """Whether any proposal has arrived."""
        return not math.isnan(self._mean)

    def observe_arrival(self, delay_s: float) -> None:
        """A proposal arrived `delay_s` after its root was known; early ones count as 0."""
        delay_s = max(0.0, delay_s)
        self._longest += _LONGEST_GAIN * (self.mean_s - self._longest)
        self._longest = max(self._longest, delay_s)
        if not self.has_data:
            self._mean, self._deviation = delay_s, delay_s / 2.0
            return
        off = delay_s - self._mean
        self._mean += _MEAN_GAIN * off
        self._deviation += _DEVIATION_GAIN * (abs(off) - self._deviation)

    @property
    def mean_s(self) -> float:
        """Mean delay; 0 while nothing is known."""
        return self._mean if self.has_data else 0.0

    @property
    def latest_s(self) -> float:
        """The delay within which nearly every proposal arrives; infinite while unknown.

        The longest of late counts too: those that were drafted ahead and come a little late are no
        reason to give up the others, however few these are.
        """
        if not self.has_data:
            return math.inf
        return max(self._mean + TIMEOUT_STD_DEVIATIONS * self._deviation, self._longest)


def proposal_timeout_s(
    arrival: ArrivalEstimate, round_s: float, *, bound_s: float, ceiling_s: float
) -> float:
    """How long a row waits for its proposal.

    As long as nearly every proposal takes, and one round more: giving up sooner costs a round's
    drafts, later a round's time. At least two rounds. At most `ceiling_s` or those two rounds,
    whatever is longer: that is what a stopped drafter costs; and at most `bound_s`, the
    plan's.
    """
    ceiling = max(ceiling_s, MIN_WAIT_ROUNDS * round_s)
    wanted = max(arrival.latest_s + round_s, MIN_WAIT_ROUNDS * round_s)
    return min(wanted, ceiling, bound_s)
