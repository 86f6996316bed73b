"""Accumulation of a session's speculation statistics, and texts of the planner's decisions."""

from __future__ import annotations

from typing import Final

from outrider.spec.decoding_mode import DecodingMode, DecodingModeReason
from outrider.wire.messages import (
    DECISION_SHIFT,
    PAUSED,
    SpecStats,
)

_REASONS: Final = ("", *DecodingModeReason)
REASON_FLAGS: Final = {why: code << DECISION_SHIFT for code, why in enumerate(_REASONS)}
"""Event flags for each reason of a planner's decision."""


def describe_decision(flags: int) -> str:
    """Return the planner's decision for a round and its reason, such as "speculate/faster", or ""
    if the planner decides nothing. `flags` are event flags as in `SessionEvents.flags`.
    """
    return _DECISIONS[flags & _DECISION_BITS]


def _decision(flags: int) -> str:
    why = _REASONS[flags >> DECISION_SHIFT & 3]
    return (
        f"{DecodingMode.PLAIN if flags & PAUSED else DecodingMode.SPECULATE}/{why}" if why else ""
    )


_DECISION_BITS: Final = PAUSED | 3 << DECISION_SHIFT
# Every round of every session asks.
_DECISIONS: Final = {
    flags: _decision(flags) for flags in range(_DECISION_BITS + 1) if not flags & ~_DECISION_BITS
}


def add_round(
    stats: SpecStats,
    proposed: int,
    accepted_len: int,
    emitted: int,
    fallback: bool,
    target_only: bool = False,
    planned: int = 0,
    looked_ahead: bool = False,
    hit: bool = False,
) -> SpecStats:
    """Return the statistics after one more round.

    `proposed` is the number of draft nodes verified, and `accepted_len` the number accepted (<=
    proposed). `emitted` is the number of tokens that reached the stream: usually accepted_len + 1,
    fewer if a stop ended the session. `fallback` says that the plan is speculative but there was no
    proposal. `target_only` says that the session has the rejection rule, but the round used the
    target-only rule because the draft distribution was missing. `planned` holds the event flags of
    the planner's decision, or 0 if it decides nothing. `looked_ahead` says that the plan has
    look-ahead and the session wanted a proposal. `hit` says that this proposal arrived before its
    prefix was known.
    """
    assert 0 <= accepted_len <= proposed, (accepted_len, proposed)
    per_depth = stats.accepted_per_depth
    if accepted_len:
        missing = (0,) * (accepted_len - len(per_depth))
        stood = [count + 1 for count in (*per_depth, *missing)[:accepted_len]]
        per_depth = (*stood, *per_depth[accepted_len:])
    hit_now = looked_ahead and hit
    fresh_now = looked_ahead and not (hit or fallback)
    # Not `replace`, which takes several times as long.
    return SpecStats(
        rounds=stats.rounds + 1,
        emitted=stats.emitted + emitted,
        proposed=stats.proposed + proposed,
        accepted=stats.accepted + accepted_len,
        fallback_rounds=stats.fallback_rounds + int(fallback),
        target_only_rounds=stats.target_only_rounds + int(target_only),
        paused_rounds=stats.paused_rounds + int(planned & PAUSED > 0),
        decision=describe_decision(planned),
        accepted_per_depth=per_depth,
        look_ahead_rounds=stats.look_ahead_rounds + int(looked_ahead),
        hit_rounds=stats.hit_rounds + int(hit_now),
        hit_accepted=stats.hit_accepted + hit_now * accepted_len,
        fresh_rounds=stats.fresh_rounds + int(fresh_now),
        fresh_accepted=stats.fresh_accepted + fresh_now * accepted_len,
        drafted_rounds=stats.drafted_rounds + int(proposed > 0),
    )
