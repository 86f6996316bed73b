"""A few rounds that were held up say nothing about the others; old rows count less."""

from __future__ import annotations

import math

import pytest
from outrider_verifier.planner.statistics import WINDOW_ROUNDS, RoundMean, TokenCounts


def test_the_mean_follows_the_last_rounds_and_clips_outliers() -> None:
    mean = RoundMean()
    assert math.isnan(mean.mean) and mean.relative_variance == math.inf
    for _ in range(WINDOW_ROUNDS):
        mean.add(0.005)
    assert mean.mean == pytest.approx(0.005)
    mean.add(5.0)
    assert mean.mean < 0.006
    for _ in range(WINDOW_ROUNDS):
        mean.add(0.008)
    assert mean.mean == pytest.approx(0.008)
    assert mean.rounds == WINDOW_ROUNDS


def test_what_is_long_more_often_is_usual() -> None:
    mean = RoundMean()
    for count in range(WINDOW_ROUNDS):
        mean.add(0.02 if count % 4 == 0 else 0.004)
    assert mean.mean == pytest.approx(0.008)


def test_rounds_of_a_part_of_the_sessions_count_as_a_part() -> None:
    mean = RoundMean()
    mean.add(1.0, 0.5)
    mean.add(2.0, 1.5)
    assert mean.mean == pytest.approx(1.75)
    assert mean.rounds == 2.0


def test_many_rows_leave_less_doubt_and_a_few_equal_ones_are_no_proof() -> None:
    few, many = TokenCounts(), TokenCounts()
    assert math.isnan(few.mean) and few.relative_variance == math.inf
    few.add(4, 8, 16)
    for _ in range(16):
        many.add(4, 8, 20)
    assert few.mean == many.mean == 2.0
    assert few.relative_variance > 0.02 > many.relative_variance > 0.0
    many.decay(1.0)
    assert many.rows == 32.0 and many.mean == 2.0
    many.add(32, 128, 512)
    assert many.mean == 3.0
