"""What speculation has won is spent on further texts, and what it lost is won back slowly."""

from __future__ import annotations

import math

import pytest

from outrider.speculation.loss_allowance import ANOTHER_TRY, MOST, MOST_LOST, Winnings
from outrider.speculation.measurements import Emitted


def tries(winnings: Winnings, emitted: Emitted, needed: float, rounds: int) -> int:
    """How many bad texts are begun with drafts in so many plain rounds."""
    begun = 0
    for _ in range(rounds):
        if winnings.spendable:
            begun += 1
            winnings.add(-ANOTHER_TRY)
            winnings.gave_up(emitted, needed)
        winnings.decoded_plainly(1.0)
    return begun


def rows(tokens: float, count: int = 8) -> Emitted:
    return Emitted(count, count * tokens, count * tokens * tokens, count)


def test_nothing_is_spent_before_it_is_won() -> None:
    winnings = Winnings()
    assert not winnings.spendable
    winnings.add(0.5)
    assert winnings.spendable


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_long_past_is_forgotten(sign: int) -> None:
    winnings = Winnings()
    for _ in range(1000):
        winnings.add(sign * 5.0)
    winnings.add(-sign * (MOST if sign > 0 else MOST_LOST))
    winnings.add(-sign * 1e-6)
    assert winnings.spendable is (sign < 0)


def test_what_nobody_knows_changes_nothing() -> None:
    winnings = Winnings()
    winnings.add(1.0)
    winnings.add(math.nan)
    assert winnings.spendable


def test_texts_that_might_be_better_are_tried_sooner_and_less_and_less_often() -> None:
    hopeless = tries(Winnings(), rows(1.0), 3.0, 4000)
    near = tries(Winnings(), rows(2.0), 2.4, 4000)
    assert 4 <= hopeless < near <= 12
    assert tries(Winnings(), rows(2.0), 2.4, 700) >= 3


def test_another_load_begins_with_what_was_won_unless_it_begins_plainly() -> None:
    winnings = Winnings()
    winnings.add(10.0)
    assert Winnings.beside(winnings, plain=False).spendable
    assert not Winnings.beside(winnings, plain=True).spendable


def test_other_drafts_owe_nothing() -> None:
    winnings = Winnings()
    winnings.add(-10.0)
    winnings.renew()
    winnings.add(0.1)
    assert winnings.spendable
