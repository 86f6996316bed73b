"""Estimates follow what is observed, tables interpolate, lengths maximise tokens per second."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.cost_table import CostTable
from outrider.speculation.draft_length import choose_draft_length
from outrider.speculation.estimates import AcceptanceEstimate, ArrivalEstimate, proposal_timeout_s


def test_acceptance_follows_rounds_and_later_ones_count_more() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(100):
        estimate.observe_round(4, 4)
    assert (estimate.rates(4) > 0.9).all()
    for _ in range(100):
        estimate.observe_round(4, 1)
    rates = estimate.rates(4)
    assert rates[0] > 0.9
    assert rates[1] < 0.2
    # Nothing behind the first rejection was tried: what was known of it stays.
    assert rates[3] > 0.9


def test_a_session_begins_with_what_its_kind_knows_and_then_differs() -> None:
    kind = AcceptanceEstimate()
    other = AcceptanceEstimate(kind)
    for _ in range(60):
        other.observe_round(3, 0)
    other.share_with_prior()
    session = AcceptanceEstimate(kind)
    assert session.rates(1)[0] == kind.rates(1)[0] < 0.2
    for _ in range(30):
        session.observe_round(3, 3)
    assert session.rates(1)[0] > 0.8
    assert session.rates(1)[0] > other.rates(1)[0]


@given(rounds=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=20))
def test_rates_are_probabilities_and_reach_falls(rounds: list[tuple[int, int]]) -> None:
    estimate = AcceptanceEstimate()
    for depth, accepted in rounds:
        estimate.observe_round(depth, accepted)
    rates, reached = estimate.rates(8), estimate.acceptance_by_depth(8)
    assert ((rates > 0.0) & (rates < 1.0)).all()
    assert (np.diff(reached) <= 0.0).all()


def test_patience_covers_the_usual_arrival_and_no_stopped_drafter_costs_more_than_its_ceiling() -> (
    None
):
    arrival = ArrivalEstimate()
    assert proposal_timeout_s(arrival, 0.005, bound_s=1.0, ceiling_s=0.04) == 0.04
    for delay in (0.002, 0.0022, 0.0018) * 20:
        arrival.observe_arrival(delay)
    usual = proposal_timeout_s(arrival, 0.005, bound_s=1.0, ceiling_s=0.04)
    assert 0.0022 < usual < 0.012
    assert proposal_timeout_s(arrival, 0.005, bound_s=0.003, ceiling_s=0.04) == 0.003
    # On a slow machine two rounds are the longest wait.
    assert proposal_timeout_s(ArrivalEstimate(), 0.1, bound_s=1.0, ceiling_s=0.04) == 0.2


@given(delays=st.lists(st.floats(-1.0, 10.0), max_size=50), round_s=st.floats(0.0, 1.0))
def test_patience_is_bounded_whatever_arrives(delays: list[float], round_s: float) -> None:
    arrival = ArrivalEstimate()
    for delay in delays:
        arrival.observe_arrival(delay)
    proposal_timeout = proposal_timeout_s(arrival, round_s, bound_s=1.0, ceiling_s=0.04)
    assert min(2.0 * round_s, 1.0) <= proposal_timeout <= min(1.0, max(0.04, 2.0 * round_s))


def test_a_cost_table_interpolates_and_fills_its_gaps() -> None:
    table = CostTable()
    assert math.isnan(table.estimate(1, 0))
    assert not table.has_data
    table.observe_forward(1, 0, 0.004)
    assert table.estimate(64, 256) == pytest.approx(0.004)
    table.observe_forward(1, 4, 0.005)
    table.observe_forward(8, 0, 0.006)
    assert table.estimate(1, 3.5) == pytest.approx(0.005, rel=0.05)
    assert 0.004 < table.estimate(5, 0) < 0.006
    assert table.estimate(8, 32) >= table.estimate(1, 4)
    for _ in range(200):
        table.observe_forward(1, 0, 0.008)
    assert table.estimate(1, 0) == pytest.approx(0.008, rel=0.02)


@given(
    rounds=st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 4000), st.floats(1e-6, 10.0)), max_size=20
    ),
    rows=st.integers(1, 300),
)
def test_more_nodes_never_cost_less(rounds: list[tuple[int, int, float]], rows: int) -> None:
    table = CostTable()
    for count, nodes, seconds in rounds:
        table.observe_forward(count, nodes, seconds)
    times = table.estimates(rows, np.linspace(0.0, 70.0 * rows, 40))
    assert not table.has_data or (np.diff(times) >= -1e-12).all()


def test_a_stall_of_a_shape_that_is_seldom_met_does_not_stand_for_it() -> None:
    table = CostTable()
    for seconds in (0.004, 0.2, 0.0041):
        table.observe_forward(64, 256, seconds)
    for seconds in (0.2, 0.0039):
        table.observe_forward(1, 4, seconds)
    assert table.estimate(1, 4) == pytest.approx(0.0039)
    assert table.estimate(64, 256) == pytest.approx(0.004)


def test_bad_observations_are_ignored() -> None:
    table = CostTable()
    for rows, seconds in ((0, 1.0), (1, 0.0), (1, math.nan), (1, -1.0)):
        table.observe_forward(rows, 0, seconds)
    assert not table.has_data


def test_the_length_is_where_tokens_per_second_are_most() -> None:
    flat = np.full(8, 0.9).cumprod()
    steep = np.full(8, 0.3).cumprod()
    assert choose_draft_length(flat, lambda n: np.full(len(n), 0.005)) == 8
    assert choose_draft_length(flat[:0], lambda n: np.full(len(n), 0.005)) == 0
    assert choose_draft_length(flat, lambda n: 0.005 + 0.02 * n) == 1
    assert choose_draft_length(steep, lambda n: 0.005 + 0.0005 * n) in (1, 2)
    # What any draft costs is no reason for a short one, even where none would be better.
    assert choose_draft_length(flat, lambda n: 0.004 + 0.001 * n, extra_s=0.05) == 8
    assert choose_draft_length(flat, lambda n: 0.005 + 0.0 * n, step_s=0.004) < 8
    # The present length stays unless another one is clearly better.
    assert choose_draft_length(steep, lambda n: 0.005 + 0.0 * n, present=4) == 4
    assert choose_draft_length(flat, lambda n: np.full(len(n), math.nan)) == 8
