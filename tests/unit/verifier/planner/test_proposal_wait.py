"""A row waits as long as proposals usually take, and a stopped drafter costs a bounded time."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.planner.proposal_wait import ArrivalEstimate, proposal_timeout_s


def test_the_timeout_covers_the_usual_arrival_and_has_a_ceiling() -> None:
    arrival = ArrivalEstimate()
    assert arrival.mean_s == 0.0 and arrival.latest_s == math.inf
    assert proposal_timeout_s(arrival, 0.005, bound_s=1.0, ceiling_s=0.04) == 0.04
    for delay in (0.002, 0.0022, 0.0018) * 20:
        arrival.observe_arrival(delay)
    usual = proposal_timeout_s(arrival, 0.005, bound_s=1.0, ceiling_s=0.04)
    assert 0.0022 < usual < 0.012
    assert proposal_timeout_s(arrival, 0.005, bound_s=0.003, ceiling_s=0.04) == 0.003
    # On a slow machine two rounds are the longest wait.
    assert proposal_timeout_s(ArrivalEstimate(), 0.1, bound_s=1.0, ceiling_s=0.04) == 0.2


def test_late_proposals_are_waited_for_though_most_come_early() -> None:
    arrival = ArrivalEstimate()
    for delay in [0.012] * 8 + [0.0003] * 30:
        arrival.observe_arrival(delay)
    assert proposal_timeout_s(arrival, 0.004, bound_s=1.0, ceiling_s=0.04) > 0.008


@given(delays=st.lists(st.floats(-1.0, 10.0), max_size=50), round_s=st.floats(0.0, 1.0))
def test_the_timeout_is_bounded_whatever_arrives(delays: list[float], round_s: float) -> None:
    arrival = ArrivalEstimate()
    for delay in delays:
        arrival.observe_arrival(delay)
    timeout_s = proposal_timeout_s(arrival, round_s, bound_s=1.0, ceiling_s=0.04)
    assert min(2.0 * round_s, 1.0) <= timeout_s <= min(1.0, max(0.04, 2.0 * round_s))
