"""A probe is bounded by what it loses once the change is over, and ends when it has won."""

from __future__ import annotations

import pytest

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.probe import LONG_PROBE_ROUNDS, MAX_LOSS_ROUNDS, PROBE_ROUNDS, ModeProbe

USUAL_S = 0.005


def seen(
    tokens: float, seconds: float, *, settled: bool = True, rows: int = 64
) -> RoundObservation:
    return RoundObservation(
        rows=rows,
        tokens=rows * tokens,
        squares=rows * tokens * tokens,
        seconds=rows * seconds,
        sessions=64,
        is_load_steady=settled,
    )


def lost(*rounds: RoundObservation) -> ModeProbe:
    probe = ModeProbe(DecodingMode.SPECULATE, PROBE_ROUNDS)
    for each in rounds:
        probe.add_loss(each, USUAL_S, 1.0)
        probe.count_round(each)
    return probe


def test_what_the_change_takes_is_lost_but_breaks_nothing_off() -> None:
    probe = lost(seen(1.0, 0.25, settled=False))
    assert probe.lost_s == pytest.approx(0.245)
    assert not probe.is_too_expensive(USUAL_S)
    assert not probe.is_over(USUAL_S)


def test_rounds_that_lose_do() -> None:
    rounds = [seen(1.0, 3.0 * USUAL_S)] * int(MAX_LOSS_ROUNDS)
    count = next(n for n in range(1, 9) if lost(*rounds[:n]).is_too_expensive(USUAL_S))
    assert 3 <= count <= 4


def test_one_stall_does_not() -> None:
    probe = lost(seen(3.0, 0.1))
    assert not probe.is_too_expensive(USUAL_S)
    assert lost(*[seen(3.0, 0.1)] * 3).is_too_expensive(USUAL_S)


def test_one_that_has_won_is_known_when_it_has_lasted_as_long_as_it_must() -> None:
    good = seen(3.0, 2.5 * USUAL_S)
    assert not lost(*[good] * (int(PROBE_ROUNDS) - 1)).has_won
    probe = lost(*[good] * int(PROBE_ROUNDS))
    assert probe.has_won
    assert not probe.is_over(USUAL_S)
    assert lost(*[good] * int(LONG_PROBE_ROUNDS)).is_over(USUAL_S)


def test_a_few_sessions_that_began_in_it_do_not_speak_for_the_many_that_came_to_it() -> None:
    few, many = seen(3.0, 0.01, rows=4), seen(1.0, 0.03, settled=False, rows=60)
    probe = lost(*[few, many] * 12)
    assert probe.rounds_left == pytest.approx(PROBE_ROUNDS - 12 * 4 / 64)
    # Later those that begin all the time are what the mode costs, too.
    assert lost(*[seen(3.0, 0.01)] * 2).count_round(few)
    assert lost(*[seen(3.0, 0.01)] * 2).count_round(many)
