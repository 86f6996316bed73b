"""A few rounds tell what one takes, stalls or not; rows tell what they emit, with their doubt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.speculation.measurements import (
    MAX_STALL_SHARE,
    OUTLIER_FACTOR,
    WINDOW_ROUNDS,
    EmissionStats,
    RoundTimeWindow,
)


def test_times_are_those_of_the_last_rounds_and_stalls_count_a_few_rounds() -> None:
    times = RoundTimeWindow()
    assert math.isnan(times.mean_s)
    for seconds in (0.01, 5.0, 0.01, 0.01):
        times.observe_round(seconds)
    assert times.mean_s == pytest.approx(0.01 * (3 + OUTLIER_FACTOR) / 4)
    assert times.clip_outlier(1.0) == pytest.approx(OUTLIER_FACTOR * times.mean_s)
    for _ in range(WINDOW_ROUNDS):
        times.observe_round(0.03, 0.5)
    assert times.mean_s == pytest.approx(0.03)
    assert times.rounds == pytest.approx(WINDOW_ROUNDS / 2)
    times.clear()
    assert math.isnan(times.mean_s)
    assert times.rounds == 0.0
    assert times.clip_outlier(1.0) == 1.0


def test_a_stall_in_the_first_two_rounds_is_not_what_a_round_takes() -> None:
    for first in ((1.0, 0.01), (0.01, 1.0)):
        times = RoundTimeWindow()
        for seconds in first:
            times.observe_round(seconds)
        assert times.mean_s <= 0.02


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_more_rows_the_sooner_too_few_tokens_are_too_few(rows: int) -> None:
    rng, needed = np.random.default_rng(rows), 2.0
    rounds = []
    for _ in range(50):
        emitted, count = EmissionStats(), 0
        while not emitted.is_below(needed) and count < 500:
            tokens = 1 + rng.poisson(0.4, rows)
            emitted.add_rows(rows, float(tokens.sum()), float((tokens**2).sum()), 1.0)
            count += 1
        rounds.append(count)
    assert np.mean(rounds) < {1: 10, 8: 3, 64: 2}[rows]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_enough_tokens_are_hardly_ever_too_few(rows: int) -> None:
    rng = np.random.default_rng(rows)
    wrong = 0
    for _ in range(200):
        emitted = EmissionStats()
        for _ in range(4):
            tokens = 1 + rng.poisson(1.4, rows)
            emitted.add_rows(rows, float(tokens.sum()), float((tokens**2).sum()), 1.0)
        wrong += emitted.is_below(2.0)
    assert wrong <= 8


def test_what_is_old_counts_less_and_nothing_is_short_of_nothing() -> None:
    emitted = EmissionStats()
    assert math.isnan(emitted.mean)
    assert not emitted.is_below(10.0)
    emitted.add_rows(10.0, 10.0, 10.0, 10.0)
    emitted.decay(1.0)
    emitted.add_rows(5.0, 15.0, 45.0, 5.0)
    assert emitted.mean == pytest.approx(2.0)


def test_rounds_that_are_long_every_few_times_are_no_stalls() -> None:
    times = RoundTimeWindow()
    for count in range(32):
        times.observe_round(0.016 if count % 4 == 0 else 0.004)
    assert times.mean_s == pytest.approx(0.007)


def test_a_stall_that_all_sessions_met_in_parts_of_a_round_is_cut_off() -> None:
    times = RoundTimeWindow()
    for count in range(12):
        times.observe_round(0.1 if count in (5, 6, 7) else 0.004, rounds=0.4)
    assert times.mean_s < 0.0065


def test_what_rounds_take_is_what_a_slow_look_at_the_last_of_them_finds() -> None:
    rng = np.random.default_rng(5)
    times, kept = RoundTimeWindow(), list[tuple[float, float]]()
    for count in range(400):
        seen = (float(rng.choice([0.004, 0.005, 0.02, 0.3])), float(rng.choice([0.25, 1.0])))
        times.observe_round(*seen)
        kept = [*kept, seen][-WINDOW_ROUNDS:]
        if count % 3 == 0:
            assert times.mean_s == pytest.approx(slow_mean(kept))
        assert times.rounds == pytest.approx(sum(weight for _, weight in kept))
    times.clear()
    assert math.isnan(times.mean_s)


def slow_mean(kept: list[tuple[float, float]]) -> float:
    """The mean of rounds of which the longest, an eighth of a window at most, may be stalls."""
    longest_first = sorted(kept, reverse=True)
    above = 0.0
    while len(longest_first) > (len(kept) + 1) // 2:
        above += longest_first[0][1]
        if above > WINDOW_ROUNDS * MAX_STALL_SHARE:
            break
        longest_first.pop(0)
    most = OUTLIER_FACTOR * longest_first[0][0]
    total = sum(min(seconds, most) * weight for seconds, weight in kept)
    return total / sum(weight for _, weight in kept)
