"""What of a look-ahead is worth its time."""

from __future__ import annotations

import math

import pytest
from outrider_drafter.look_ahead.launch_value import NO_PASS, Opening, Stakes, next_slice, opening
from outrider_drafter.look_ahead.timing import Arrivals, Step, StepTimes, Wait

from outrider.spec.plan import DraftMethod

DRAFT = Step(DraftMethod.EAGLE3, "draft", 5)
SCORE, BRANCH = DRAFT._replace(kind="score"), DRAFT._replace(kind="branch")
SENT, HIT = Wait(1, after_hit=False), Wait(1, after_hit=True)


def stakes(*due: float, covered: float = 0.0) -> Stakes:
    return Stakes(due, [covered] * len(due), draft_s=2.0, exchange_s=0.5)


def test_a_draft_saves_less_the_later_it_is() -> None:
    assert stakes(3.0).saved(1.0) == [2.5]
    assert stakes(3.0).saved(2.5) == [2.5], "it must be there before the round's end"
    assert stakes(3.0).saved(3.0) == [2.0]
    assert stakes(3.0).saved(4.5) == [0.5]
    assert stakes(3.0).saved(6.0) == [0.0]


def test_what_other_outcomes_wait_is_set_against_it() -> None:
    assert stakes(3.0).worth([0.5], 2.0) == 0.5 * 2.5
    assert stakes(3.0).worth([0.5], 4.0) == 0.5 * 1.0 - 0.5 * 1.0
    assert stakes(3.0, covered=0.5).worth([0.5], 4.0) == 0.5 * 1.0, "nobody waits for a draft"
    assert stakes(3.0, 3.5).worth([0.5, 0.0], 4.0) == -0.5, "nor is another session forgotten"


def test_of_the_next_launch_as_much_as_pays() -> None:
    gains = [0.2] * 2 + [0.01] * 30
    sizes = {4: 1.0, 16: 1.2, 32: 4.0, 64: 5.0}

    def cost(count: int) -> float:
        return sizes[count]

    owners = [0] * len(gains)
    assert next_slice(stakes(9.0), owners, gains, branch=cost) == 32
    assert next_slice(stakes(2.0), owners, gains, branch=cost) == 16
    # What is added would delay more than it would win.
    sizes[16] = 2.0
    assert next_slice(stakes(1.5), owners, gains, branch=cost) == 4
    assert next_slice(stakes(-1.5), owners, gains, branch=cost) == 0
    assert next_slice(stakes(math.inf), owners, gains, branch=cost) == 32
    assert next_slice(stakes(9.0), [], [], branch=cost) == 0
    assert next_slice(stakes(9.0), owners, [0.0] * 32, branch=cost) == 0


@pytest.mark.parametrize(
    ("due", "able", "found"),
    [
        # All of them, where there is time for all.
        ((9.0, 9.0, 9.0, 9.0, 9.0), (0, 1, 2, 3, 4), Opening(5, straight=False)),
        # Those whose verdicts are far off; the others' come meanwhile, and are not waited for.
        ((9.0, 1.9, 1.9, 1.9, 1.9), (0, 1, 2, 3, 4), Opening(1, straight=False)),
        ((9.0, 9.0, 0.5), (0, 1), Opening(2, straight=True)),
        # Nothing would be in time.
        ((0.5,), (0,), NO_PASS),
        ((0.5, 0.5), (0, 1), NO_PASS),
    ],
)
def test_passes_begin_where_they_pay(
    due: tuple[float, ...], able: tuple[int, ...], found: Opening
) -> None:
    scores = {1: 1.0, 2: 1.5, 4: 3.0, 5: 4.0}
    got = opening(
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
    assert times.expect(SCORE, 1) == 0.0
    times.saw(DRAFT, 1, 2.0)
    assert times.expect(SCORE, 8) == times.expect(BRANCH, 16) == 2.0
    for seconds in (1.0, 9.0, 1.1):
        times.saw(BRANCH, 10, seconds)
    assert times.expect(BRANCH, 16) == times.expect(BRANCH, 64) == 1.1
    assert times.expect(BRANCH, 4) == pytest.approx(0.88), "so it is tried, and known"
    times.saw(BRANCH, 3, 1.05)
    assert times.expect(BRANCH, 4) == 1.05
    for _ in range(9):
        times.saw(BRANCH, 16, 3.0)
    assert times.expect(BRANCH, 16) == 3.0


def test_verdicts_are_expected_rather_too_soon() -> None:
    arrivals = Arrivals()
    assert arrivals.expect(SENT) == math.inf and arrivals.exchange(1) == 0.0
    for seconds in (5.0, 4.0, 6.0, 7.0, 90.0):
        arrivals.saw(SENT, seconds, seconds)
    assert arrivals.expect(SENT) == arrivals.expect(HIT) == 5.0
    arrivals.saw(HIT, 4.5, 4.5)
    assert arrivals.expect(HIT) == 4.5 and arrivals.exchange(1) == 0.5
    arrivals.forget(1)
    assert arrivals.expect(SENT) == math.inf


def test_a_verdict_found_after_a_launch_does_not_seem_to_come_then() -> None:
    arrivals = Arrivals()
    for _ in range(8):
        arrivals.saw(SENT, 5.0, 5.0)
    for _ in range(32):
        arrivals.saw(SENT, 4.0, 9.0)
    assert arrivals.expect(SENT) == 5.0
    for _ in range(32):
        arrivals.saw(SENT, 6.0, 9.0)
    assert arrivals.expect(SENT) == 6.0
    # Nobody has seen one for long: one is waited for, and what was believed before is forgotten.
    assert arrivals.is_blind(SENT, 1) and not arrivals.is_blind(SENT, 2)
    arrivals.saw(SENT, 3.0, 3.0)
    assert arrivals.expect(SENT) == 3.0 and not arrivals.is_blind(SENT, 1)
