"""What stale drafts lose is found whatever texts give, and not invented where nothing is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.speculation.look_ahead_acceptance import (
    MIN_DEVIATION,
    PRIOR_STALE_DEVIATION,
    PRIOR_STALE_SHARE,
    LookAheadAcceptance,
)
from outrider.speculation.measurements import RoundObservation

TRIAL, BETWEEN = 8, 40


def rows(tokens: list[int], sessions: int = 1) -> RoundObservation:
    """A round of these rows."""
    squares = float(sum(count * count for count in tokens))
    return RoundObservation(len(tokens), float(sum(tokens)), squares, 0.01, sessions)


def paired(
    share: float, *, texts: float, sessions: int, pairs: int, seed: int
) -> LookAheadAcceptance:
    """Trials of lock-step in sessions under look-ahead, each in other texts than the last."""
    rng, found = np.random.default_rng(seed), LookAheadAcceptance()
    for _ in range(pairs):
        found.begin_session(sessions)
        usual = 3.0 * np.exp(rng.normal(0.0, texts, sessions))
        for way in [True] * BETWEEN + [False] * TRIAL + [True] * BETWEEN:
            emitted = rng.poisson(usual * (share if way else 1.0))
            found.observe_rows(rows(np.maximum(emitted, 1).tolist(), sessions), ahead=way)
    return found


def test_until_ways_were_compared_it_is_what_heads_were_seen_to_lose() -> None:
    found = LookAheadAcceptance()
    for _ in range(500):
        found.observe_rows(rows([1, 1]), ahead=True)
    assert found.estimate() == (math.log(PRIOR_STALE_SHARE), PRIOR_STALE_DEVIATION**2)


@pytest.mark.parametrize("texts", [0.0, 0.8])
@pytest.mark.parametrize(("sessions", "pairs"), [(1, 100), (8, 16)])
@pytest.mark.parametrize("share", [0.8, 1.0])
def test_many_pairs_tell_it_however_much_texts_differ(
    share: float, sessions: int, pairs: int, texts: float
) -> None:
    found = [
        math.exp(
            paired(share, texts=texts, sessions=sessions, pairs=pairs, seed=seed).estimate()[0]
        )
        for seed in range(3)
    ]
    assert np.mean(found) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_a_hard_text_under_one_way_says_nothing_of_another_one(seed: int) -> None:
    rng, found = np.random.default_rng(seed), LookAheadAcceptance()
    for way, usual in ((True, 1.2), (False, 4.0), (True, 1.2)) * 20:
        found.begin_session(1)
        for _ in range(BETWEEN):
            found.observe_rows(rows([1 + int(rng.poisson(usual))]), ahead=way)
    assert found.estimate() == (math.log(PRIOR_STALE_SHARE), PRIOR_STALE_DEVIATION**2)


def test_a_text_among_many_is_left_out_by_its_share() -> None:
    found = LookAheadAcceptance()
    for way in (True, False):
        for _ in range(4):
            found.observe_rows(rows([3] * 4, 4), ahead=way)
    few = found.estimate().variance
    found.begin_session(4)
    assert few < found.estimate().variance < PRIOR_STALE_DEVIATION**2


def test_it_stays_uncertain_enough_to_follow_a_change() -> None:
    found = paired(1.0, texts=0.0, sessions=8, pairs=200, seed=0)
    assert found.estimate().variance >= MIN_DEVIATION**2
