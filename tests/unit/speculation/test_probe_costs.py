"""What a trial may lose is what the last one lost, or what is known of a higher load."""

from __future__ import annotations

import pytest

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.probe_costs import DRAFTER_CATCH_UP_ROUNDS, FIRST_PROBE_ROUNDS, ProbeCosts

USUAL_S = 0.005


def price(prices: ProbeCosts, mode: DecodingMode, sessions: int = 8) -> float:
    return prices.expected_loss_s(mode, usual_s=USUAL_S, sessions=sessions)


def test_before_there_was_one_drafts_are_dearer_by_who_comes_back() -> None:
    prices = ProbeCosts()
    assert price(prices, DecodingMode.PLAIN) == FIRST_PROBE_ROUNDS * USUAL_S
    assert (
        price(prices, DecodingMode.SPECULATE, 64)
        == (FIRST_PROBE_ROUNDS + 64 * DRAFTER_CATCH_UP_ROUNDS) * USUAL_S
    )


@pytest.mark.parametrize("mode", DecodingMode)
def test_the_last_one_tells(mode: DecodingMode) -> None:
    prices = ProbeCosts()
    for lost_s in (0.4, 0.0):
        prices.record_loss(mode, lost_s)
        assert price(prices, mode) == lost_s


def test_a_lower_load_begins_with_its_part_of_what_a_higher_one_lost() -> None:
    higher = ProbeCosts()
    higher.record_loss(DecodingMode.SPECULATE, 0.4)
    half = ProbeCosts.from_other_load(higher, 1)
    assert price(half, DecodingMode.SPECULATE) == 0.2
    # Nothing was tried there either, so the one below it asks the highest.
    assert price(ProbeCosts.from_other_load(half, 1), DecodingMode.SPECULATE) == 0.1
    # It is never less than what coming back takes at first.
    assert price(ProbeCosts.from_other_load(higher, 6), DecodingMode.SPECULATE) == price(
        ProbeCosts(), DecodingMode.SPECULATE
    )


def test_nothing_follows_for_higher_loads_or_for_plain_rounds() -> None:
    lower = ProbeCosts()
    lower.record_loss(DecodingMode.SPECULATE, 0.04)
    lower.record_loss(DecodingMode.PLAIN, 0.04)
    for halvings in (0, -6):
        assert price(ProbeCosts.from_other_load(lower, halvings), DecodingMode.SPECULATE) == price(
            ProbeCosts(), DecodingMode.SPECULATE
        )
    assert price(ProbeCosts.from_other_load(lower, 1), DecodingMode.PLAIN) == price(
        ProbeCosts(), DecodingMode.PLAIN
    )
