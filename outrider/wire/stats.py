"""Speculation statistics of a session."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """Speculation counters of one session since it began, or of all sessions of a verifier."""

    rounds: int = 0
    """Number of verification rounds that emitted tokens. Prefill is not counted."""
    emitted: int = 0
    """Number of tokens that the `rounds` emitted."""
    proposed: int = 0
    """Number of draft nodes that were verified."""
    accepted: int = 0
    """Number of draft nodes that were accepted."""
    fallback_rounds: int = 0
    """Number of rounds for which the plan was speculative but there was no proposal."""
    target_only_rounds: int = 0
    """Number of rounds of the rejection rule that used the target-only rule, because the draft
    distribution was missing."""
    accepted_per_depth: tuple[int, ...] = ()
    """Number of accepted draft tokens at each depth. Index 0 is depth 1, below the root."""
    paused_rounds: int = 0
    """Number of rounds without speculation because the verifier's planner measured that to be
    faster."""
    decision: str = ""
    """Decision of the verifier's planner for the newest round, with its reason, such as
    "speculate/faster"; empty if the planner decides nothing."""
    look_ahead_rounds: int = 0
    """Number of rounds in which the plan had look-ahead and the session wanted a proposal
    (look-ahead rounds)."""
    hit_rounds: int = 0
    """Number of look-ahead rounds whose proposal arrived before its prefix was known (hits)."""
    hit_accepted: int = 0
    """Number of draft nodes accepted in hits."""
    fresh_rounds: int = 0
    """Number of look-ahead rounds whose proposal arrived only after the previous round had ended
    (fresh rounds)."""
    fresh_accepted: int = 0
    """Number of draft nodes accepted in fresh rounds."""
    drafted_rounds: int = 0
    """Number of rounds that verified at least one draft node."""

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Number of rounds with a draft by the number of accepted draft tokens: element n is the
        number of such rounds that accepted exactly n. The elements sum to `drafted_rounds`, and
        weighted by their indices to `accepted`.

        A round that accepted n draft tokens accepted one at each depth up to n, so the differences
        of `accepted_per_depth` are exact. Empty if the accepted tokens were not counted by depth,
        as in the totals of a verifier.
        """
        if sum(self.accepted_per_depth) != self.accepted:
            return ()
        reached = (self.drafted_rounds, *self.accepted_per_depth, 0)
        return tuple(at - beyond for at, beyond in pairwise(reached))

    @property
    def hit_rate(self) -> float:
        """Share of the look-ahead rounds that were hits: their proposal arrived before its prefix
        was known."""
        return _ratio(self.hit_rounds, self.look_ahead_rounds)

    @property
    def accepted_per_hit(self) -> float:
        """Mean number of accepted draft nodes in a hit: a look-ahead round whose proposal arrived
        before its prefix was known."""
        return _ratio(self.hit_accepted, self.hit_rounds)

    @property
    def accepted_per_fresh_round(self) -> float:
        """Mean number of accepted draft nodes in a fresh round: a look-ahead round whose proposal
        arrived only after the previous round had ended, so that it is no hit."""
        return _ratio(self.fresh_accepted, self.fresh_rounds)


def _ratio(part: int, whole: int) -> float:
    """Return part / whole, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
