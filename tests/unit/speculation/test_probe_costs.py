"""What a trial may lose is what the last one lost, or what is known of a higher load."""

from __future__ import annotations

import pytest

from outrider.spec.decoding_mode import Mode
from outrider.speculation.probe_costs import FIRST_PROBE_COST, RETURN_COST, ProbeCosts

USUAL_S = 0.005


def price(prices: ProbeCosts, mode: Mode, sessions: int = 8) -> float:
    return prices.expected_loss_s(mode, usual_s=USUAL_S, sessions=sessions)


def test_before_there_was_one_drafts_are_dearer_by_who_comes_back() -> None:
    prices = ProbeCosts()
    assert price(prices, Mode.PLAIN) == FIRST_PROBE_COST * USUAL_S
    assert price(prices, Mode.SPECULATE, 64) == (FIRST_PROBE_COST + 64 * RETURN_COST) * USUAL_S


@pytest.mark.parametrize("mode", Mode)
def test_the_last_one_tells(mode: Mode) -> None:
    prices = ProbeCosts()
    for lost_s in (0.4, 0.0):
        prices.record_loss(mode, lost_s)
        assert price(prices, mode) == lost_s


def test_a_lower_load_begins_with_its_part_of_what_a_higher_one_lost() -> None:
    higher = ProbeCosts()
    higher.record_loss(Mode.SPECULATE, 0.4)
    half = ProbeCosts.from_other_load(higher, 1)
    assert price(half, Mode.SPECULATE) == 0.2
    # Nothing was tried there either, so the one below it asks the highest.
    assert price(ProbeCosts.from_other_load(half, 1), Mode.SPECULATE) == 0.1
    # It is never less than what coming back takes at first.
    assert price(ProbeCosts.from_other_load(higher, 6), Mode.SPECULATE) == price(
        ProbeCosts(), Mode.SPECULATE
    )


def test_nothing_follows_for_higher_loads_or_for_plain_rounds() -> None:
    lower = ProbeCosts()
    lower.record_loss(Mode.SPECULATE, 0.04)
    lower.record_loss(Mode.PLAIN, 0.04)
    for halvings in (0, -6):
        assert price(ProbeCosts.from_other_load(lower, halvings), Mode.SPECULATE) == price(
            ProbeCosts(), Mode.SPECULATE
        )
    assert price(ProbeCosts.from_other_load(lower, 1), Mode.PLAIN) == price(
        ProbeCosts(), Mode.PLAIN
    )
