"""Acceptance follows the last rows; the draft length maximises expected tokens per second."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from outrider_verifier.planner.draft_length import (
    AcceptanceByDepth,
    ForwardTimes,
    choose_draft_length,
)


def test_acceptance_follows_rows_and_later_ones_count_more() -> None:
    acceptance = AcceptanceByDepth(4)
    for _ in range(400):
        acceptance.observe_row(4, 4)
    assert acceptance.reach()[3] > 0.9
    for _ in range(400):
        acceptance.observe_row(4, 1)
        acceptance.reach()
    reach = acceptance.reach()
    assert reach[0] > 0.9
    assert reach[1] < 0.2


def test_depths_that_no_draft_reaches_any_more_return_to_the_prior() -> None:
    acceptance = AcceptanceByDepth(4)
    for _ in range(400):
        acceptance.observe_row(4, 1)
        acceptance.reach()
    low = acceptance.reach()[1]
    for _ in range(2000):
        acceptance.observe_row(1, 1)
        acceptance.reach()
    assert acceptance.reach()[1] > 3.0 * low


@given(rounds=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=20))
def test_reach_is_a_probability_that_falls_with_depth(rounds: list[tuple[int, int]]) -> None:
    acceptance = AcceptanceByDepth(8)
    for depth, accepted in rounds:
        acceptance.observe_row(depth, accepted)
    reach = acceptance.reach()
    assert ((reach > 0.0) & (reach < 1.0)).all()
    assert (np.diff(reach) <= 0.0).all()


def test_forwards_are_interpolated_between_what_was_seen() -> None:
    times = ForwardTimes()
    assert math.isnan(times.estimate(2))
    times.observe_forward(4, 0.008)
    assert math.isnan(times.estimate(2))
    times.observe_forward(0, 0.004)
    assert times.estimate(2) == pytest.approx(0.006)
    times.observe_forward(4, 8.0)
    assert times.estimate(4) < 0.011, "a round that was held up"
    times.observe_forward(2, 0.001)
    assert times.estimate(2) == pytest.approx(0.004), "more nodes never take less"


def test_the_length_is_where_tokens_per_second_are_most() -> None:
    flat, steep = np.full(8, 0.9).cumprod(), np.full(8, 0.3).cumprod()

    def length(
        reach: NDArray[np.float64], base_s: float, each_s: float, extra_s: float, present: int
    ) -> int:
        return choose_draft_length(
            reach, lambda n: base_s + each_s * n, extra_s=extra_s, present=present
        )

    assert length(flat, 0.005, 0.0, 0.0, 8) == 8
    assert length(flat, 0.005, 0.02, 0.0, 8) == 1
    assert length(steep, 0.005, 0.0005, 0.0, 8) in (1, 2)
    # What any draft costs is no reason for a short one.
    assert length(flat, 0.004, 0.001, 0.05, 8) == 8
    # The present length stays unless another one is clearly better.
    assert length(steep, 0.005, 0.0, 0.0, 4) == 4
    assert length(flat, math.nan, 0.0, 0.0, 2) == 8
