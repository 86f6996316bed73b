"""The benchmark of the host's share of a round goes through every step of both processes."""

from __future__ import annotations

from outrider_bench.host import BESIDE, measure


def test_every_step_is_timed_in_every_round() -> None:
    steps = measure(2, 4)
    assert {len(taken) for taken in steps.taken.values()} == {4}
    assert all(steps.lowest(name) > 0.0 for name in steps.taken)
    critical = [name for name in steps.taken if BESIDE not in name]
    assert sum(name.startswith("verifier: ") for name in critical) == 8
    assert sum(name.startswith("drafter: ") for name in critical) == 5
