"""What speculation has won is spent on further texts, and what it lost is won back slowly."""

from __future__ import annotations

import math

import pytest

from outrider.speculation.loss_allowance import (
    MAX_GAIN_ROUNDS,
    MAX_LOSS_ROUNDS,
    RETRY_COST_ROUNDS,
    SessionGains,
)
from outrider.speculation.measurements import EmissionStats


def tries(winnings: SessionGains, emitted: EmissionStats, needed: float, rounds: int) -> int:
    """How many bad texts are begun with drafts in so many plain rounds."""
    begun = 0
    for _ in range(rounds):
        if winnings.can_spend:
            begun += 1
            winnings.add_rounds(-RETRY_COST_ROUNDS)
            winnings.record_failure(emitted, needed)
        winnings.add_plain_rounds(1.0)
    return begun


def rows(tokens: float, count: int = 8) -> EmissionStats:
    return EmissionStats(count, count * tokens, count * tokens * tokens, count)


def test_nothing_is_spent_before_it_is_won() -> None:
    winnings = SessionGains()
    assert not winnings.can_spend
    winnings.add_rounds(0.5)
    assert winnings.can_spend


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_long_past_is_forgotten(sign: int) -> None:
    winnings = SessionGains()
    for _ in range(1000):
        winnings.add_rounds(sign * 5.0)
    winnings.add_rounds(-sign * (MAX_GAIN_ROUNDS if sign > 0 else MAX_LOSS_ROUNDS))
    winnings.add_rounds(-sign * 1e-6)
    assert winnings.can_spend is (sign < 0)


def test_what_nobody_knows_changes_nothing() -> None:
    winnings = SessionGains()
    winnings.add_rounds(1.0)
    winnings.add_rounds(math.nan)
    assert winnings.can_spend


def test_texts_that_might_be_better_are_tried_sooner_and_less_and_less_often() -> None:
    hopeless = tries(SessionGains(), rows(1.0), 3.0, 4000)
    near = tries(SessionGains(), rows(2.0), 2.4, 4000)
    assert 4 <= hopeless < near <= 12
    assert tries(SessionGains(), rows(2.0), 2.4, 700) >= 3


def test_another_load_begins_with_what_was_won_unless_it_begins_plainly() -> None:
    winnings = SessionGains()
    winnings.add_rounds(10.0)
    assert SessionGains.from_other_load(winnings, plain=False).can_spend
    assert not SessionGains.from_other_load(winnings, plain=True).can_spend


def test_other_drafts_owe_nothing() -> None:
    winnings = SessionGains()
    winnings.add_rounds(-10.0)
    winnings.reset()
    winnings.add_rounds(0.1)
    assert winnings.can_spend
