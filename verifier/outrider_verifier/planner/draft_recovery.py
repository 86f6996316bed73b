"""Decides for which sessions draft KV is recomputed. Pure.

A session without draft KV decodes plainly. Draft KV is computed from the target's features, so
recomputing it means prefilling the whole prefix of the session again; meanwhile the session emits
no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from outrider.ids import SessionId

MIN_TOKENS_LEFT: Final = 16
"""Minimum number of tokens that a session is expected to emit for a recomputation to pay. Sessions
that end sooner continue without drafts."""
SAVED_SHARE: Final = 0.5
"""Expected share of a session's remaining rounds that drafts save."""
MAX_UNDRAFTED_ROUNDS: Final = 32
"""Number of consecutive rounds without a draft after which the drafter is assumed to have refused
the session."""
MAX_RECOMPUTING: Final = 1
"""Maximum number of sessions that recompute at the same time. Two would delay each other."""


class UndraftedSession(NamedTuple):
    """A running session without draft KV."""

    session_id: SessionId
    opened_at: float
    tokens_left: int
    """Number of further tokens that the session is expected to emit."""
    recompute_s: float
    """Time to prefill the session's prefix again, in seconds; 0 if unknown."""


def recovery_order(sessions: Iterable[UndraftedSession], *, round_s: float) -> list[SessionId]:
    """Return the sessions for which drafts are expected to save more time than the recomputation
    takes; sessions that were opened first come first. `round_s` is the time of a round in seconds;
    if it is 0 (unknown), the recomputation time is ignored."""
    worth = [
        each
        for each in sessions
        if each.tokens_left >= MIN_TOKENS_LEFT
        and (not round_s or each.recompute_s <= SAVED_SHARE * each.tokens_left * round_s)
    ]
    return [each.session_id for each in sorted(worth, key=attrgetter("opened_at"))]
