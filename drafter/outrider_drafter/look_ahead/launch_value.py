"""How much of a look-ahead is worth its time: what to score, and what to draft for next (pure).

A pass is cut into launches, after each of which messages are looked at; a draft that is wanted
meanwhile waits for the end of one. All times in seconds from now. S sessions whose verdicts are
waited for, K outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from outrider_drafter.look_ahead.timing import SESSION_SIZES
from outrider_drafter.state.outcomes import BRANCH_SIZES

Cost = Callable[[int], float]
"""Seconds of a launch, by how many it is for."""
_LEAST_GAIN: Final = 1e-7
"""What a launch must gain, a session: less is rounding."""


class Stakes(NamedTuple):
    """What may be won and lost by a launch."""

    due: Sequence[float]
    """[S]: until the verdict comes; it may be overdue."""
    covered: Sequence[float]
    """[S]: probability that the outcome was drafted for already."""
    draft_s: float
    """A draft after a verdict,"""
    exchange_s: float
    """and what else a draft that is there before its verdict saves."""

    def worth(self, hits: Sequence[float], ends: float) -> float:
        """What is gained by drafts that leave at `ends`, for further outcomes of probability
        `hits` [S]: the time by which they are there sooner, less that by which drafts for all
        other outcomes come later."""
        gained, saved = 0.0, self.saved(ends)
        for due, covered, hit, saves in zip(self.due, self.covered, hits, saved, strict=True):
            gained += hit * saves
            if ends > due:
                gained -= max(1.0 - covered - hit, 0.0) * (ends - due)
        return gained

    def saved(self, ends: float) -> list[float]:
        """[S]: by how much a draft that leaves at `ends` is there sooner than one that is made
        after its verdict."""
        most = self.draft_s + self.exchange_s
        return [min(max(due + self.draft_s - ends, 0.0), most) for due in self.due]


class Opening(NamedTuple):
    """How a pass begins."""

    lives: int
    """Proposals that are scored, of those that may be, in their order; 0: there is no pass."""
    straight: bool
    """Whether it goes on to the first drafts without a look at messages: one is expected."""


NO_PASS: Final = Opening(0, straight=False)


def opening(
    stakes: Stakes,
    able: Sequence[int],
    *,
    score: Cost,
    branch: Cost,
    foreseen: Callable[[float], float],
    fan_out: int,
) -> Opening:
    """Whether to begin a pass, and over how many of the sessions `able`, best first (indices of
    S). foreseen: the probability of a hit, by outcomes of a session; at most `fan_out`."""
    first = min(stakes.due)
    best, found = _LEAST_GAIN * len(able), NO_PASS
    for size in SESSION_SIZES:
        count = min(size, len(able))
        scored = score(count)
        for outcomes in BRANCH_SIZES:
            each = min(outcomes / count, fan_out)
            hits = [0.0] * len(stakes.due)
            for index in able[:count]:
                hits[index] = max(foreseen(each) - stakes.covered[index], 0.0)
            worth = stakes.worth(hits, scored + branch(outcomes))
            if worth > best:
                best, found = worth, Opening(count, straight=first < scored)
            if outcomes >= fan_out * count:
                break
        if count == len(able):
            break
    return found


def next_slice(
    stakes: Stakes, owners: Sequence[int], gains: Sequence[float], *, branch: Cost
) -> int:
    """How many of these outcomes [K], in their order, the next launch is for; 0: none that it can
    be for is worth the time. owners: indices of S."""
    hits = [0.0] * len(stakes.due)
    best, found, first = _LEAST_GAIN, 0, 0
    for size in BRANCH_SIZES:
        for owner, gain in zip(owners[first:size], gains[first:size], strict=True):
            hits[owner] += gain
        worth = stakes.worth(hits, branch(size))
        if worth > best:
            best, found = worth, min(size, len(owners))
        if size >= len(owners):
            break
        first = size
    return found
