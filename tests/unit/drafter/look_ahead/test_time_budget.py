"""Look-ahead that is cut to the time there is, on a drafter and a verifier in simulated time.

Costs of an 8B's head on an H200 as `ahead.json` has them for one session; what passes of several
take was never measured apart: so long as that whole ones lose what they lost there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.simulated_drafter import Costs, Ran, run

CHAIN = Costs(
    nodes=5,
    draft=(1.54, 1.6, 1.7, 2.0, 2.8),
    score=(1.88, 2.1, 2.5, 3.7, 6.2),
    branch=(1.4, 1.54, 1.79, 1.9),
    foreseen=(0.726, 0.814, 0.862),
)
TREE_16 = Costs(
    nodes=16,
    draft=(1.52, 1.7, 2.0, 2.6, 4.0),
    score=(1.8, 2.3, 2.9, 5.2, 9.2),
    branch=(1.45, 1.62, 1.83, 2.72),
    foreseen=(0.450, 0.563, 0.656),
)
TREE_32 = Costs(
    nodes=32,
    draft=(1.83, 2.1, 2.6, 4.0, 7.0),
    score=(2.1, 2.7, 3.6, 6.2, 11.2),
    branch=(1.95, 2.17, 2.69, 5.28),
    foreseen=(0.450, 0.563, 0.656),
)


def three(costs: Costs, sessions: int, rounds: int) -> tuple[Ran, Ran, Ran]:
    """Lock-step, every pass made whole, and passes cut to the time there is."""
    lockstep = run(costs, sessions, look_ahead=False, rounds=rounds, seed=1)
    whole = run(costs, sessions, look_ahead=True, in_time=False, rounds=rounds, seed=1)
    return lockstep, whole, run(costs, sessions, look_ahead=True, rounds=rounds, seed=1)


@pytest.mark.parametrize(
    ("costs", "gain"), [(CHAIN, 1.28), (TREE_16, 1.15), (TREE_32, 1.15)], ids=["5", "16", "32"]
)
def test_what_fits_is_made_as_ever(costs: Costs, gain: float) -> None:
    lockstep, whole, cut = three(costs, 1, 80)
    assert cut.rounds_per_s >= 0.98 * whole.rounds_per_s
    assert cut.rounds_per_s > gain * lockstep.rounds_per_s
    assert cut.cut < 0.05


@pytest.mark.parametrize("costs", [CHAIN, TREE_16, TREE_32], ids=["5", "16", "32"])
def test_a_drafter_too_slow_for_any_pass_is_in_lock_step(costs: Costs) -> None:
    lockstep, whole, cut = three(replace(costs, slowdown=3.0), 1, 120)
    assert whole.rounds_per_s < 0.93 * lockstep.rounds_per_s
    assert cut.rounds_per_s > 0.98 * lockstep.rounds_per_s
    assert cut.cut > 0.9


@pytest.mark.parametrize(
    ("costs", "sessions", "times"),
    [(CHAIN, 8, 2.2), (CHAIN, 32, 2.2), (TREE_32, 8, 1.5), (TREE_32, 32, 2.2)],
)
def test_passes_of_many_that_are_longer_than_a_round_cost_little(
    costs: Costs, sessions: int, times: float
) -> None:
    slow = replace(
        costs,
        score=tuple(times * each for each in costs.score),
        branch=tuple(times * each for each in costs.branch),
    )
    lockstep, whole, cut = three(slow, sessions, 40 if sessions == 8 else 20)
    assert whole.rounds_per_s < 0.9 * lockstep.rounds_per_s
    assert cut.rounds_per_s > 0.97 * lockstep.rounds_per_s


def test_what_is_known_of_times_follows_a_change() -> None:
    """A drafter that becomes fast enough finds out: now and then a pass is made all the same."""
    slow = replace(CHAIN, slowdown=3.0)
    lockstep = run(slow, 1, look_ahead=False, rounds=400, seed=1, then=CHAIN)
    cut = run(slow, 1, look_ahead=True, rounds=400, seed=1, then=CHAIN)
    assert cut.rounds_per_s > 1.05 * lockstep.rounds_per_s
