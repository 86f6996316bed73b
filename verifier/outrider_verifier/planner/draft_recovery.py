"""Decides for which sessions draft KV is recomputed. Pure.

Draft KV is computed from the target's features, so the whole prefix of the session is prefilled
again, and the session emits no tokens meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from outrider.ids import SessionId

MIN_TOKENS_LEFT: Final = 16
"""Minimum expected number of remaining tokens; sessions that end sooner continue without drafts."""
SAVED_SHARE: Final = 0.5
"""Expected share of a session's rounds that drafts save."""
MAX_UNDRAFTED_ROUNDS: Final = 32
"""Rounds in a row without a draft after which a drafter is taken to have refused the session."""
MAX_RECOMPUTING: Final = 1
"""Maximum number of sessions that recompute at the same time, since two would make each other
wait."""


class UndraftedSession(NamedTuple):
    """A running session without draft KV."""

    session_id: SessionId
    opened_at: float
    tokens_left: int
    """Number of tokens that the session is expected to emit."""
    recompute_s: float
    """Time to prefill the session's prefix again, in seconds; 0 if unknown."""


def recovery_order(sessions: Iterable[UndraftedSession], *, round_s: float) -> list[SessionId]:
    """Return the sessions for which drafts save more time than the recomputation costs, oldest
    first. `round_s` is the time of a round in seconds; if it is 0 (unknown), recomputation costs
    are ignored."""
    worth = [
        each
        for each in sessions
        if each.tokens_left >= MIN_TOKENS_LEFT
        and (not round_s or each.recompute_s <= SAVED_SHARE * each.tokens_left * round_s)
    ]
    return [each.session_id for each in sorted(worth, key=attrgetter("opened_at"))]
