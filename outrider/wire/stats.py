"""Speculation statistics of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """Speculation counters of one session, cumulative."""

    rounds: int = 0
    """Verify forwards of this session that emitted tokens (prefill not counted)."""
    emitted: int = 0
    """Tokens emitted by those rounds."""
    proposed: int = 0
    """Draft nodes verified."""
    accepted: int = 0
    """Draft nodes accepted."""
    fallback_rounds: int = 0
    """Rounds without a proposal although the plan is speculative."""
    target_only_rounds: int = 0
    """Rejection rounds judged target-only because the draft distribution was missing."""
    accepted_per_depth: tuple[int, ...] = ()
    """How often a draft token at depth d (1-based, index d-1) stood."""
    paused_rounds: int = 0
    """Rounds decoded plainly because the verifier's planner had found that faster."""
    decision: str = ""
    """What its planner had in force for the newest round and why: "speculate/faster"; empty: the
    plan was carried out as it is."""
    look_ahead_rounds: int = 0
    """Rounds of a plan with look-ahead that used a proposal, or wanted one in vain."""
    hit_rounds: int = 0
    """Of these, rounds whose proposal had come before its prefix did."""
    hit_accepted: int = 0
    """Draft nodes accepted in them."""
    fresh_rounds: int = 0
    """Of these, rounds whose proposal was made for a prefix that was there."""
    fresh_accepted: int = 0
    """Draft nodes accepted in them."""
    drafted_rounds: int = 0
    """Rounds that verified draft nodes."""

    @property
    def hit_rate(self) -> float:
        """Share of the look-ahead rounds whose proposal had come before its prefix did."""
        return _ratio(self.hit_rounds, self.look_ahead_rounds)

    @property
    def accepted_per_hit(self) -> float:
        """Draft nodes accepted a round of hits."""
        return _ratio(self.hit_accepted, self.hit_rounds)

    @property
    def accepted_per_fresh_round(self) -> float:
        """Draft nodes accepted a look-ahead round whose proposal was made for a prefix that was
        there."""
        return _ratio(self.fresh_accepted, self.fresh_rounds)


def _ratio(part: int, whole: int) -> float:
    """0 of nothing."""
    return part / whole if whole else 0.0
