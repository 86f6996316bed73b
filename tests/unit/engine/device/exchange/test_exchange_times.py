"""ExchangeTimes tells the idle time of each round once, and believes no strange number."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.engine.device.exchange.exchange_times import ExchangeTimes
from outrider.engine.kernels.exchange.buffers import ROUND_TIMES, ROUNDS_KEPT


def new_history() -> NDArray[np.int64]:
    """What a side has before its first round."""
    return np.zeros((ROUNDS_KEPT, len(ROUND_TIMES)), dtype=np.int64)


def put(history: NDArray[np.int64], number: int, **times: int) -> None:
    """Write a round as the device does: 5 ms each, of which 70 us idle and 1 ms drafting."""
    begun = number * 5_000_000
    told = {
        "wait_begin": begun,
        "wait_end": begun + 900_000,
        "published": begun + 4_900_000,
        "taken": begun + 920_000,
        "accepted": begun + 4_850_000,
        "drafting_ns": 1_000_000,
        "rows": 8,
        "hits": 0,
        "unused": 0,
        "number": number,
    } | times
    history[number % ROUNDS_KEPT] = [told[name] for name in ROUND_TIMES]


def test_each_round_is_told_once() -> None:
    history = new_history()
    times = ExchangeTimes(history)
    put(history, 1)
    assert list(times.take_rounds()) == []
    put(history, 2)
    put(history, 3)
    found = list(times.take_rounds())
    assert [each.rows for each in found] == [8, 8]
    assert found[0].idle_s == pytest.approx(70e-6)
    assert (found[0].drafting_s, found[0].waited_s) == pytest.approx((1e-3, 0.9e-3))
    assert list(times.take_rounds()) == []
    put(history, 4)
    assert len(list(times.take_rounds())) == 1
    assert times.answered == 4


def test_rounds_that_were_not_kept_are_left_out() -> None:
    history = new_history()
    times = ExchangeTimes(history)
    for number in range(1, 2 * ROUNDS_KEPT + 1):
        put(history, number)
    assert len(list(times.take_rounds())) == ROUNDS_KEPT - 1
    put(history, 2 * ROUNDS_KEPT + 5)
    assert list(times.take_rounds()) == []


@pytest.mark.parametrize(
    "strange",
    [
        {"rows": 4},
        {"rows": -1},
        {"drafting_ns": 0},
        {"drafting_ns": -(2**63)},
        {"drafting_ns": 2**62},
        {"drafting_ns": 1_070_001},
    ],
)
def test_a_round_that_compares_with_nothing_is_left_out(strange: dict[str, int]) -> None:
    history = new_history()
    times = ExchangeTimes(history)
    put(history, 1)
    put(history, 2, **strange)
    assert list(times.take_rounds()) == []


def test_a_round_of_hits_waited_for_no_draft() -> None:
    history = new_history()
    times = ExchangeTimes(history)
    put(history, 1)
    put(history, 2, hits=8, drafting_ns=0)
    (found,) = times.take_rounds()
    assert (found.hits, found.drafting_s) == (8, 0.0)
    assert found.idle_s == pytest.approx(1070e-6)


def test_rounds_are_counted_by_what_their_wait_found() -> None:
    history = new_history()
    times = ExchangeTimes(history)
    put(history, 1)
    put(history, 2, drafting_ns=0)
    put(history, 3, drafting_ns=0, hits=5)
    put(history, 4, hits=2)
    # It only prefills: the stamps are those of the round before.
    put(history, 5, rows=-1, hits=2, wait_begin=20_000_000)
    list(times.take_rounds())
    assert (times.answered, times.late, times.hits) == (3, 1, 7)


def test_another_exchange_begins_anew() -> None:
    history = new_history()
    times = ExchangeTimes(history)
    for number in (1, 2, 3):
        put(history, number)
    list(times.take_rounds())
    times.forget()
    put(history, 1)
    put(history, 2)
    assert len(list(times.take_rounds())) == 1
