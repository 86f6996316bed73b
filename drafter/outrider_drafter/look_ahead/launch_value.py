"""Expected value of look-ahead launches: how many proposals to score and outcomes to draft. Pure.

A pass is cut into launches, and messages are polled after each; a draft that is wanted meanwhile
waits for the end of one. All times in seconds from now. S sessions whose verdicts are waited for, K
outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from outrider_drafter.look_ahead.timing import SESSION_BUCKETS
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES

LaunchCost = Callable[[int], float]
"""Seconds of a launch, by how many it is for."""
_MIN_GAIN: Final = 1e-7
"""What a launch must gain, a session: less is rounding."""


class LaunchValue(NamedTuple):
    """Expected gain and loss of a look-ahead launch."""

    seconds_to_verdict: Sequence[float]
    """[S]: until the verdict comes; it may be overdue."""
    covered_probability: Sequence[float]
    """[S]: probability that the outcome was drafted for already."""
    draft_s: float
    """Time that a draft after a verdict takes, s."""
    exchange_s: float
    """Time of the exchange that a draft made before its verdict saves, s."""

    def expected_value(self, hits: Sequence[float], ends: float) -> float:
        """What is gained by drafts that leave at `ends`, for further outcomes of probability
        `hits` [S]: the time by which they are there sooner, less that by which drafts for all
        other outcomes come later."""
        gained, saved = 0.0, self.seconds_saved(ends)
        for due, covered, hit, saves in zip(
            self.seconds_to_verdict, self.covered_probability, hits, saved, strict=True
        ):
            gained += hit * saves
            if ends > due:
                gained -= max(1.0 - covered - hit, 0.0) * (ends - due)
        return gained

    def seconds_saved(self, ends: float) -> list[float]:
        """[S]: by how much a draft that leaves at `ends` is there sooner than one that is made
        after its verdict."""
        most = self.draft_s + self.exchange_s
        return [min(max(due + self.draft_s - ends, 0.0), most) for due in self.seconds_to_verdict]


class PassPlan(NamedTuple):
    """How a pass begins."""

    num_proposals: int
    """Proposals that are scored, of those that may be, in their order; 0: there is no pass."""
    skips_poll: bool
    """Whether it goes on to the first drafts without a look at messages: one is expected."""


NO_PASS: Final = PassPlan(0, skips_poll=False)


def plan_pass_start(
    stakes: LaunchValue,
    able: Sequence[int],
    *,
    score: LaunchCost,
    branch: LaunchCost,
    foreseen: Callable[[float], float],
    fan_out: int,
) -> PassPlan:
    """Whether to begin a pass, and over how many of the sessions `able`, best first (indices of
    S). foreseen: the probability of a hit, by outcomes of a session; at most `fan_out`."""
    first = min(stakes.seconds_to_verdict)
    best, found = _MIN_GAIN * len(able), NO_PASS
    for size in SESSION_BUCKETS:
        count = min(size, len(able))
        scored = score(count)
        for outcomes in OUTCOME_BATCH_SIZES:
            each = min(outcomes / count, fan_out)
            hits = [0.0] * len(stakes.seconds_to_verdict)
            for index in able[:count]:
                hits[index] = max(foreseen(each) - stakes.covered_probability[index], 0.0)
            worth = stakes.expected_value(hits, scored + branch(outcomes))
            if worth > best:
                best, found = worth, PassPlan(count, skips_poll=first < scored)
            if outcomes >= fan_out * count:
                break
        if count == len(able):
            break
    return found


def next_launch_outcomes(
    stakes: LaunchValue, owners: Sequence[int], gains: Sequence[float], *, branch: LaunchCost
) -> int:
    """How many of these outcomes [K], in their order, the next launch is for; 0: none that it can
    be for is worth the time. owners: indices of S."""
    hits = [0.0] * len(stakes.seconds_to_verdict)
    best, found, first = _MIN_GAIN, 0, 0
    for size in OUTCOME_BATCH_SIZES:
        for owner, gain in zip(owners[first:size], gains[first:size], strict=True):
            hits[owner] += gain
        worth = stakes.expected_value(hits, branch(size))
        if worth > best:
            best, found = worth, min(size, len(owners))
        if size >= len(owners):
            break
        first = size
    return found
