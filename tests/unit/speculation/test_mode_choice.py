"""The way whose rounds take less for what they emit is in force; trials of the other are few."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from outrider.speculation.look_ahead_acceptance import PRIOR_STALE_SHARE, LogRatioEstimate
from outrider.speculation.look_ahead_probe import LookAheadTrials, RoundModeObservation

LOCKSTEP_S = 0.007
KNOWN = LogRatioEstimate(math.log(PRIOR_STALE_SHARE), 0.03**2)
BEGINNINGS: dict[str, Callable[[], LookAheadTrials]] = {
    "ahead": lambda: LookAheadTrials(ahead=True),
    "lock-step": lambda: LookAheadTrials(ahead=False),
    "lock-step, likely": lambda: LookAheadTrials(ahead=False, waits=True),
}


def run(ways: LookAheadTrials, faster: float, rounds: int, *, seed: int = 0) -> tuple[int, int]:
    """Rounds of one session, of look-ahead `faster` than those of lock-step; how many were under
    look-ahead, how many of a trial."""
    rng, looked, tried, before = np.random.default_rng(seed), 0, 0, ways.is_ahead
    for _ in range(rounds):
        ahead = ways.is_ahead
        took = LOCKSTEP_S / (faster if ahead else 1.0) * math.exp(rng.normal(0.0, 0.08))
        if ahead:
            # Hits and misses.
            took *= float(rng.choice([0.7, 1.3]))
        looked, tried = looked + ahead, tried + ways.is_trial
        ways.observe_round(
            RoundModeObservation(1.0, took, ahead is before, is_timed=True), KNOWN, ahead=ahead
        )
        before = ahead
    return looked, tried


@pytest.mark.parametrize("make", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("faster", [0.5, 0.85, 1.25, 2.0])
def test_the_faster_way_is_found_and_kept(
    faster: float, make: Callable[[], LookAheadTrials]
) -> None:
    for seed in range(2):
        ways = make()
        run(ways, faster, 500, seed=seed)
        looked, tried = run(ways, faster, 500, seed=seed + 10)
        assert tried < 50
        assert (looked > 440) if faster > 1.0 else (looked < 60)
        assert (ways.gain > 1.0) is (faster > 1.0)


def test_a_service_of_a_few_answers_spends_little_on_trials() -> None:
    tried = [run(LookAheadTrials(ahead=True), 1.3, 600, seed=seed)[1] for seed in range(4)]
    assert np.mean(tried) < 0.03 * 600


def test_a_way_that_is_likely_is_compared_only_when_that_is_paid_for() -> None:
    ways = LookAheadTrials(ahead=False, waits=True)
    assert run(ways, 1.3, 150) == (0, 0)
    assert run(ways, 1.3, 150)[1] > 0


def test_look_ahead_that_gets_slower_is_left_before_the_next_trial_is_due() -> None:
    ways = LookAheadTrials(ahead=True)
    run(ways, 1.3, 400)
    assert ways.in_force
    run(ways, 0.6, 80)
    assert not ways.in_force


def test_a_stall_decides_nothing() -> None:
    for stalled in range(0, 40, 3):
        ways = LookAheadTrials(ahead=True)
        run(ways, 1.4, stalled)
        ways.observe_round(
            RoundModeObservation(1.0, 1.0, is_load_steady=True, is_timed=True),
            KNOWN,
            ahead=ways.is_ahead,
        )
        run(ways, 1.4, 40)
        assert ways.in_force, stalled


@pytest.mark.parametrize("stalled", [1, 2, 4, 6])
def test_a_trial_that_meets_a_stall_finds_the_faster_way_all_the_same(stalled: int) -> None:
    """In its round `stalled`, the one that changes the way not counted."""
    for seed in range(4):
        ways = LookAheadTrials(ahead=True)
        rng, tried, before = np.random.default_rng(seed), 0, True
        for _ in range(60):
            ahead = ways.is_ahead
            took = LOCKSTEP_S * (1.25 if ahead else 1.0) * math.exp(rng.normal(0.0, 0.05))
            tried += ways.is_trial
            stall_s = 5.0 * LOCKSTEP_S * (ways.is_trial and tried == 1 + stalled)
            ways.observe_round(
                RoundModeObservation(1.0, took + stall_s, ahead is before, is_timed=True),
                KNOWN,
                ahead=ahead,
            )
            before = ahead
        assert not ways.in_force, (seed, tried)


def test_rounds_without_a_time_tell_nothing() -> None:
    ways = LookAheadTrials(ahead=True)
    for _ in range(100):
        ways.observe_round(
            RoundModeObservation(1.0, 0.01, is_load_steady=True, is_timed=False), KNOWN, ahead=True
        )
    assert ways.is_ahead
    assert not ways.is_trial
    assert math.isnan(ways.gain)


@pytest.mark.parametrize(
    ("faster", "halvings", "trial"),
    [(1.5, 2, False), (1.5, -2, True), (0.6, -2, False), (0.6, 2, True)],
)
def test_another_load_begins_with_what_was_found_and_tries_what_may_differ(
    faster: float, halvings: int, trial: bool
) -> None:
    ways = LookAheadTrials(ahead=True)
    run(ways, faster, 200)
    assert not ways.is_trial
    near = LookAheadTrials.from_other_load(ways, halvings)
    assert near.in_force is (faster > 1.0)
    assert (run(near, faster, 40)[1] > 0) is trial
