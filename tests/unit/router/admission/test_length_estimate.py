"""What an answer is expected to have."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from outrider_router.admission.capacity_ledger import WINDOW_REQUESTS, OutputLengthEstimator


def lengths(*answers: tuple[int, int]) -> OutputLengthEstimator:
    known = OutputLengthEstimator(assumed=256, quantile=0.8)
    for emitted, bound in answers:
        known.add_answer(emitted, bound)
    return known


def test_until_enough_is_known_an_assumption_counts() -> None:
    assert lengths().expected_len(2048) == 256
    assert lengths().expected_len(100) == 100
    assert lengths(*[(10, 2048)] * 7).expected_len(2048) == 256


def test_an_upper_quantile_of_recent_answers_is_expected_within_the_bound() -> None:
    known = lengths(*[(100 + i, 2048) for i in range(100)])
    assert known.expected_len(2048) == 180
    assert known.expected_len(150) == 150


def test_answers_that_a_smaller_bound_cut_say_nothing_of_longer_ones() -> None:
    known = lengths(*[(16, 16)] * 100, *[(200, 2048)] * 10)
    assert known.expected_len(2048) == 200
    assert known.expected_len(16) == 16


def test_answers_that_reach_the_bound_are_expected_to() -> None:
    assert lengths(*[(64, 64)] * 20).expected_len(64) == 64


def test_a_running_answer_is_compared_with_those_that_were_as_long() -> None:
    known = lengths(*[(100, 2048)] * 90, *[(1000, 2048)] * 10)
    assert known.expected_len(2048) == 100
    assert known.expected_len(2048, emitted=100) == 1000
    assert known.expected_len(2048, emitted=1000) == 2000, "it outgrew all: twice as much"


def test_old_answers_are_forgotten() -> None:
    known = lengths(*[(1000, 2048)] * WINDOW_REQUESTS, *[(50, 2048)] * WINDOW_REQUESTS)
    assert known.expected_len(2048, emitted=60) == 256


def test_most_answers_stay_within_what_was_expected() -> None:
    rng, known, within = random.Random(1), lengths(), 0
    for number in range(2000):
        answer = min(2048, round(rng.lognormvariate(5.0, 0.6)))
        within += number >= 100 and answer <= known.expected_len(2048)
        known.add_answer(answer, 2048)
    assert 0.75 < within / 1900 < 0.85


@given(
    answers=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=40),
    bound=st.integers(1, 300),
    emitted=st.integers(0, 300),
)
def test_an_expectation_is_possible(
    answers: list[tuple[int, int]], bound: int, emitted: int
) -> None:
    known = lengths(*[(min(pair), pair[1]) for pair in answers])
    assert 1 <= known.expected_len(bound, emitted) <= bound
    if emitted < bound:
        assert known.expected_len(bound, emitted) > min(emitted, 0)
