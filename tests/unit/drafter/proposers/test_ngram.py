"""Prompt lookup."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outrider_drafter.proposers.ngram import find_continuation


def found(tokens: list[int], count: int = 4, *, longest: int = 3, shortest: int = 1) -> list[int]:
    array = np.array(tokens, dtype=np.int32)
    return [int(t) for t in find_continuation(array, count, max_match=longest, min_match=shortest)]


def test_it_copies_what_followed_the_same_tokens() -> None:
    assert found([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    assert found([1, 2, 3, 7, 8, 8, 3, 5, 6, 1, 2, 3], 2) == [7, 8]


def test_among_equal_matches_the_most_recent_wins() -> None:
    assert found([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_no_earlier_occurrence_gives_nothing() -> None:
    assert found([1, 2, 3, 4]) == []


def test_a_match_shorter_than_the_minimum_gives_nothing() -> None:
    assert found([5, 9, 1, 4, 9], shortest=2) == []
    assert found([5, 9, 1, 5, 9], shortest=2) == [1, 5, 9, 1]


def test_a_match_is_never_longer_than_the_maximum() -> None:
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert found(tokens, 1, longest=3) == [7]
    assert found(tokens, 1, longest=2) == [8]


def test_a_repetition_is_continued_beyond_the_end() -> None:
    assert found([4, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert found([7, 7], 3) == [7, 7, 7]


def test_too_few_tokens_or_no_room_give_nothing() -> None:
    assert found([]) == []
    assert found([3]) == []
    assert found([3, 3], 0) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6), st.integers(1, 5))
def test_it_agrees_with_a_plain_search(tokens: list[int], count: int, longest: int) -> None:
    expected: list[int] = []
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        starts = [s for s in range(len(tokens) - size) if tokens[s : s + size] == suffix]
        if starts:
            grown = list(tokens)
            source = starts[-1] + size
            for i in range(count):
                grown.append(grown[source + i])
            expected = grown[len(tokens) :]
            break
    assert found(tokens, count, longest=longest) == expected
