"""What opening a session takes is learnt from rounds that begin more and fewer of them."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_verifier.planner.load_stats import MAX_OPEN_S, PRIOR_OPEN_S, SessionOpenCost


def run(openings: SessionOpenCost, each_s: float, *, rounds: int = 600, mean: float = 4.0) -> None:
    """Rounds of both kinds in turn, one of a hundred is held up."""
    rng = np.random.default_rng(7)
    for count in range(rounds):
        own = (count // 100) % 2 == 0
        began = int(rng.poisson(2.5 * mean if own else mean))
        beyond_s = (0.0015 if own else 0.0004) * rng.lognormal(0.0, 0.3) + each_s * began
        beyond_s += 0.2 * (rng.random() < 0.01)
        openings.observe_round(began, beyond_s, own=own)


@pytest.mark.parametrize("each_s", [0.0, 0.0001, 0.0004])
def test_what_each_takes_is_found_beside_rounds_of_both_kinds(each_s: float) -> None:
    openings = SessionOpenCost()
    run(openings, each_s)
    assert openings.each_s == pytest.approx(each_s, abs=8e-5)


def test_while_nothing_tells_what_was_measured_elsewhere_is_believed() -> None:
    openings = SessionOpenCost()
    for _ in range(500):
        openings.observe_round(0, 0.001, own=True)
    assert openings.each_s == pytest.approx(PRIOR_OPEN_S)


def test_a_burst_tells_and_a_stall_does_not_become_what_openings_take() -> None:
    openings = SessionOpenCost()
    run(openings, 0.0002)
    openings.observe_round(256, 256 * 0.0002, own=True)
    assert openings.each_s == pytest.approx(0.0002, abs=2e-5)
    openings.observe_round(1, 20.0, own=True)
    assert openings.each_s == pytest.approx(0.0002, abs=5e-5)
    for _ in range(50):
        openings.observe_round(20, 1.0, own=True)
    assert openings.each_s <= MAX_OPEN_S
