"""Decides for which sessions draft KV is computed once more. Pure.

Draft KV is computed from the target's features, so all that a session has written is prefilled
again, and its stream stands still meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from outrider.ids import SessionId

MIN_TOKENS_LEFT: Final = 16
"""Sessions that are expected to end sooner go on without drafts."""
SAVED_SHARE: Final = 0.5
"""Share of its rounds that a session with drafts is expected to save."""
MAX_UNDRAFTED_ROUNDS: Final = 32
"""Rounds in a row without a draft after which a drafter is taken to have refused the session."""
MAX_RECOMPUTING: Final = 1
"""Sessions that prefill once more at the same time; each of two would stand still for both."""


class UndraftedSession(NamedTuple):
    """A running session without draft KV."""

    session_id: SessionId
    opened_at: float
    tokens_left: int
    """Tokens that it is expected to emit."""
    recompute_s: float
    """Time to prefill what it has written; 0 where that is not known."""


def recovery_order(sessions: Iterable[UndraftedSession], *, round_s: float) -> list[SessionId]:
    """Sessions for which drafts save more time than their recomputation costs, the oldest first.
    `round_s`: time of a round; 0 if unknown, and then all sessions are returned."""
    worth = [
        each
        for each in sessions
        if each.tokens_left >= MIN_TOKENS_LEFT
        and (not round_s or each.recompute_s <= SAVED_SHARE * each.tokens_left * round_s)
    ]
    return [each.session_id for each in sorted(worth, key=attrgetter("opened_at"))]
