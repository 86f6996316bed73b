"""Speculation statistics of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """Speculation counters of one session, cumulative."""

    rounds: int = 0
    """Verify rounds of this session that emitted tokens, prefill excluded."""
    emitted: int = 0
    """Tokens emitted by these rounds."""
    proposed: int = 0
    """Draft nodes verified."""
    accepted: int = 0
    """Draft nodes accepted."""
    fallback_rounds: int = 0
    """Rounds with a speculative plan that had no proposal."""
    target_only_rounds: int = 0
    """Rounds under the rejection rule that used target-only because the draft distribution was
    missing."""
    accepted_per_depth: tuple[int, ...] = ()
    """Number of accepted draft tokens at depth d (1-based, index d-1)."""
    paused_rounds: int = 0
    """Rounds without speculation because the verifier's planner measured that to be faster."""
    decision: str = ""
    """Decision of the verifier's planner for the newest round, with its reason, such as
    "speculate/faster"; empty if the planner is fixed."""
    look_ahead_rounds: int = 0
    """Rounds with look-ahead that used a proposal or wanted one."""
    hit_rounds: int = 0
    """Look-ahead rounds whose proposal arrived before its prefix was known (hits)."""
    hit_accepted: int = 0
    """Draft nodes accepted in hit rounds."""
    fresh_rounds: int = 0
    """Look-ahead rounds whose proposal was made for a known prefix (fresh)."""
    fresh_accepted: int = 0
    """Draft nodes accepted in fresh rounds."""
    drafted_rounds: int = 0
    """Rounds that verified draft nodes."""

    @property
    def hit_rate(self) -> float:
        """Share of the look-ahead rounds that were hits."""
        return _ratio(self.hit_rounds, self.look_ahead_rounds)

    @property
    def accepted_per_hit(self) -> float:
        """Mean accepted draft nodes per hit round."""
        return _ratio(self.hit_accepted, self.hit_rounds)

    @property
    def accepted_per_fresh_round(self) -> float:
        """Mean accepted draft nodes per fresh look-ahead round."""
        return _ratio(self.fresh_accepted, self.fresh_rounds)


def _ratio(part: int, whole: int) -> float:
    """Return part / whole, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
