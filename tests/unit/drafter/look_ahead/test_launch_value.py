"""What of a look-ahead is worth its time."""

from __future__ import annotations

import math

import pytest
from outrider_drafter.look_ahead.time_budget import (
    NO_PASS,
    DraftStep,
    LaunchValue,
    PassPlan,
    StepTimes,
    VerdictArrivals,
    VerdictWait,
    next_launch_outcomes,
    plan_pass_start,
)

from outrider.spec.plan import DraftMethod

DRAFT = DraftStep(DraftMethod.EAGLE3, "draft", 5)
SCORE, BRANCH = DRAFT._replace(kind="score"), DRAFT._replace(kind="branch")
SENT, HIT = VerdictWait(1, follows_hit=False), VerdictWait(1, follows_hit=True)


def stakes(*due: float, covered: float = 0.0) -> LaunchValue:
    return LaunchValue(due, [covered] * len(due), draft_s=2.0, exchange_s=0.5)


def test_a_draft_saves_less_the_later_it_is() -> None:
    assert stakes(3.0).seconds_saved(1.0) == [2.5]
    assert stakes(3.0).seconds_saved(2.5) == [2.5], "it must be there before the round's end"
    assert stakes(3.0).seconds_saved(3.0) == [2.0]
    assert stakes(3.0).seconds_saved(4.5) == [0.5]
    assert stakes(3.0).seconds_saved(6.0) == [0.0]


def test_what_other_outcomes_wait_is_set_against_it() -> None:
    assert stakes(3.0).expected_value([0.5], 2.0) == 0.5 * 2.5
    assert stakes(3.0).expected_value([0.5], 4.0) == 0.5 * 1.0 - 0.5 * 1.0
    assert stakes(3.0, covered=0.5).expected_value([0.5], 4.0) == 0.5 * 1.0, (
        "nobody waits for a draft"
    )
    assert stakes(3.0, 3.5).expected_value([0.5, 0.0], 4.0) == -0.5, (
        "nor is another session forgotten"
    )


def test_of_the_next_launch_as_much_as_pays() -> None:
    gains = [0.2] * 2 + [0.01] * 30
    sizes = {4: 1.0, 16: 1.2, 32: 4.0, 64: 5.0}

    def cost(count: int) -> float:
        return sizes[count]

    owners = [0] * len(gains)
    assert next_launch_outcomes(stakes(9.0), owners, gains, branch=cost) == 32
    assert next_launch_outcomes(stakes(2.0), owners, gains, branch=cost) == 16
    # What is added would delay more than it would win.
    sizes[16] = 2.0
    assert next_launch_outcomes(stakes(1.5), owners, gains, branch=cost) == 4
    assert next_launch_outcomes(stakes(-1.5), owners, gains, branch=cost) == 0
    assert next_launch_outcomes(stakes(math.inf), owners, gains, branch=cost) == 32
    assert next_launch_outcomes(stakes(9.0), [], [], branch=cost) == 0
    assert next_launch_outcomes(stakes(9.0), owners, [0.0] * 32, branch=cost) == 0


@pytest.mark.parametrize(
    ("due", "able", "found"),
    [
        # All of them, where there is time for all.
        ((9.0, 9.0, 9.0, 9.0, 9.0), (0, 1, 2, 3, 4), PassPlan(5, skips_poll=False)),
        # Those whose verdicts are far off; the others' come meanwhile, and are not waited for.
        ((9.0, 1.9, 1.9, 1.9, 1.9), (0, 1, 2, 3, 4), PassPlan(1, skips_poll=False)),
        ((9.0, 9.0, 0.5), (0, 1), PassPlan(2, skips_poll=True)),
        # Nothing would be in time.
        ((0.5,), (0,), NO_PASS),
        ((0.5, 0.5), (0, 1), NO_PASS),
    ],
)
def test_passes_begin_where_they_pay(
    due: tuple[float, ...], able: tuple[int, ...], found: PassPlan
) -> None:
    scores = {1: 1.0, 2: 1.5, 4: 3.0, 5: 4.0}
    got = plan_pass_start(
        stakes(*due),
        able,
        score=lambda count: scores[count],
        branch=lambda count: 1.0 + count / 64,
        foreseen=lambda outcomes: min(0.1 * outcomes, 0.8),
        fan_out=16,
    )
    assert got == found


def test_a_step_takes_what_it_took_of_late() -> None:
    times = StepTimes()
    assert times.expected_s(SCORE, 1) == 0.0
    times.observe_step(DRAFT, 1, 2.0)
    assert times.expected_s(SCORE, 8) == times.expected_s(BRANCH, 16) == 2.0
    for seconds in (1.0, 9.0, 1.1):
        times.observe_step(BRANCH, 10, seconds)
    assert times.expected_s(BRANCH, 16) == times.expected_s(BRANCH, 64) == 1.1
    assert times.expected_s(BRANCH, 4) == pytest.approx(0.88), "so it is tried, and known"
    times.observe_step(BRANCH, 3, 1.05)
    assert times.expected_s(BRANCH, 4) == 1.05
    for _ in range(9):
        times.observe_step(BRANCH, 16, 3.0)
    assert times.expected_s(BRANCH, 16) == 3.0


def test_verdicts_are_expected_rather_too_soon() -> None:
    arrivals = VerdictArrivals()
    assert arrivals.expected_s(SENT) == math.inf and arrivals.exchange_latency_s(1) == 0.0
    for seconds in (5.0, 4.0, 6.0, 7.0, 90.0):
        arrivals.observe_arrival(SENT, seconds, seconds)
    assert arrivals.expected_s(SENT) == arrivals.expected_s(HIT) == 5.0
    arrivals.observe_arrival(HIT, 4.5, 4.5)
    assert arrivals.expected_s(HIT) == 4.5 and arrivals.exchange_latency_s(1) == 0.5
    arrivals.forget_connection(1)
    assert arrivals.expected_s(SENT) == math.inf


def test_a_verdict_found_after_a_launch_does_not_seem_to_come_then() -> None:
    arrivals = VerdictArrivals()
    for _ in range(8):
        arrivals.observe_arrival(SENT, 5.0, 5.0)
    for _ in range(32):
        arrivals.observe_arrival(SENT, 4.0, 9.0)
    assert arrivals.expected_s(SENT) == 5.0
    for _ in range(32):
        arrivals.observe_arrival(SENT, 6.0, 9.0)
    assert arrivals.expected_s(SENT) == 6.0
    # Nobody has seen one for long: one is waited for, and what was believed before is forgotten.
    assert arrivals.is_blind(SENT, 1) and not arrivals.is_blind(SENT, 2)
    arrivals.observe_arrival(SENT, 3.0, 3.0)
    assert arrivals.expected_s(SENT) == 3.0 and not arrivals.is_blind(SENT, 1)
