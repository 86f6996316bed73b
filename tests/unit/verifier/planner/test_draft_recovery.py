"""Sessions prefill once more for drafts only where that gains time, the oldest first."""

from __future__ import annotations

import pytest
from outrider_verifier.planner.draft_recovery import (
    MIN_TOKENS_LEFT,
    SAVED_SHARE,
    UndraftedSession,
    recovery_order,
)

from outrider.ids import SessionId


def undrafted(
    name: str = "s", *, opened_at: float = 0.0, tokens_left: int = 100, recompute_s: float = 0.0
) -> UndraftedSession:
    return UndraftedSession(SessionId(name), opened_at, tokens_left, recompute_s)


def test_the_oldest_session_is_first() -> None:
    sessions = [undrafted(name, opened_at=at) for name, at in (("b", 2.0), ("a", 1.0), ("c", 3.0))]
    assert recovery_order(sessions, round_s=0.01) == ["a", "b", "c"]


@pytest.mark.parametrize(("tokens_left", "taken"), [(MIN_TOKENS_LEFT, 1), (MIN_TOKENS_LEFT - 1, 0)])
def test_a_session_that_is_about_to_end_goes_on_as_it_is(tokens_left: int, taken: int) -> None:
    assert len(recovery_order([undrafted(tokens_left=tokens_left)], round_s=0.01)) == taken


@pytest.mark.parametrize(("share", "taken"), [(0.99, 1), (1.01, 0)])
def test_a_recomputation_takes_no_longer_than_drafts_save(share: float, taken: int) -> None:
    saved_s = SAVED_SHARE * 100 * 0.01
    session = undrafted(tokens_left=100, recompute_s=share * saved_s)
    assert len(recovery_order([session], round_s=0.01)) == taken


def test_where_no_round_was_measured_sessions_gain() -> None:
    assert len(recovery_order([undrafted(recompute_s=5.0)], round_s=0.0)) == 1
