"""What a trial may lose is what the last one lost, or what is known of a higher load."""

from __future__ import annotations

import pytest

from outrider.spec.decoding_mode import Mode
from outrider.speculation.probe_costs import COMING_BACK, FIRST_PRICE, Prices

USUAL_S = 0.005


def price(prices: Prices, mode: Mode, sessions: int = 8) -> float:
    return prices.of(mode, usual_s=USUAL_S, sessions=sessions)


def test_before_there_was_one_drafts_are_dearer_by_who_comes_back() -> None:
    prices = Prices()
    assert price(prices, Mode.PLAIN) == FIRST_PRICE * USUAL_S
    assert price(prices, Mode.SPECULATE, 64) == (FIRST_PRICE + 64 * COMING_BACK) * USUAL_S


@pytest.mark.parametrize("mode", Mode)
def test_the_last_one_tells(mode: Mode) -> None:
    prices = Prices()
    for lost_s in (0.4, 0.0):
        prices.learn(mode, lost_s)
        assert price(prices, mode) == lost_s


def test_a_lower_load_begins_with_its_part_of_what_a_higher_one_lost() -> None:
    higher = Prices()
    higher.learn(Mode.SPECULATE, 0.4)
    half = Prices.beside(higher, 1)
    assert price(half, Mode.SPECULATE) == 0.2
    # Nothing was tried there either, so the one below it asks the highest.
    assert price(Prices.beside(half, 1), Mode.SPECULATE) == 0.1
    # It is never less than what coming back takes at first.
    assert price(Prices.beside(higher, 6), Mode.SPECULATE) == price(Prices(), Mode.SPECULATE)


def test_nothing_follows_for_higher_loads_or_for_plain_rounds() -> None:
    lower = Prices()
    lower.learn(Mode.SPECULATE, 0.04)
    lower.learn(Mode.PLAIN, 0.04)
    for halvings in (0, -6):
        assert price(Prices.beside(lower, halvings), Mode.SPECULATE) == price(
            Prices(), Mode.SPECULATE
        )
    assert price(Prices.beside(lower, 1), Mode.PLAIN) == price(Prices(), Mode.PLAIN)
