"""A session's own text as a drafter."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_drafter.proposers.ngram import find_continuation as prompt_lookup
from outrider_verifier.state import ngram_index as lookups
from outrider_verifier.state.ngram_index import MATCH_TOKENS, PRIOR_ACCEPTANCE, NgramIndex


def text(seed: int, length: int, ids: int = 4) -> NDArray[np.int32]:
    """Few ids, so that much occurs twice."""
    return np.random.default_rng(seed).integers(0, ids, length).astype(np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_of_the_whole_text_finds(seed: int) -> None:
    tokens = text(seed, 200)
    rng = np.random.default_rng(seed)
    lookup, length = NgramIndex(), 0
    while length < 190:
        length += int(rng.integers(1, 9))
        lookup.update(tokens, length)
        wanted = prompt_lookup(tokens[:length], 6, max_match=MATCH_TOKENS, min_match=MATCH_TOKENS)
        found = lookup.propose(tokens, length, 6)
        assert (found is None) == (len(wanted) == 0)
        if found is not None:
            assert found.tolist() == wanted.tolist()


def test_ids_of_large_vocabularies_do_not_collide() -> None:
    top = (1 << 21) - 1
    tokens = np.array([top, 0, 1, 7, top - 1, top, 1, top, 0, 1], dtype=np.int32)
    lookup = NgramIndex()
    lookup.update(tokens, len(tokens))
    found = lookup.propose(tokens, len(tokens), 2)
    assert found is not None and found.tolist() == [7, top - 1]


def test_of_a_long_text_the_end_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_INDEXED_TOKENS", 10)
    tokens = np.array([1, 2, 3, *range(50, 70), 1, 2, 3], dtype=np.int32)
    lookup = NgramIndex()
    lookup.update(tokens, len(tokens))
    assert lookup.propose(tokens, len(tokens), 4) is None


def test_nothing_is_found_before_there_is_anything_or_if_nothing_is_wanted() -> None:
    tokens = np.array([1, 1, 1, 1, 1], dtype=np.int32)
    lookup = NgramIndex()
    for length in range(MATCH_TOKENS):
        assert lookup.propose(tokens, length, 4) is None
    lookup.update(tokens, 5)
    assert lookup.propose(tokens, 5, 0) is None


def test_the_rate_is_learnt_from_what_came_true() -> None:
    periodic, lookup = np.tile(np.arange(5, dtype=np.int32), 40), NgramIndex()
    for length in range(10, 200, 3):
        lookup.update(periodic, length)
    assert lookup.acceptance_rate > 0.95
    broken = np.concatenate((periodic, text(3, 200, ids=3) + 10)).astype(np.int32)
    for length in range(200, 400, 3):
        lookup.update(broken, length)
    # Of three ids a third comes true by chance.
    assert lookup.acceptance_rate < 0.6
    assert lookup.acceptance_by_depth(3).tolist() == pytest.approx(
        [lookup.acceptance_rate**d for d in (1, 2, 3)]
    )


def test_a_text_without_repetition_teaches_nothing() -> None:
    lookup = NgramIndex()
    tokens = np.arange(100, dtype=np.int32)
    for length in range(10, 100, 4):
        lookup.update(tokens, length)
    assert lookup.acceptance_rate == PRIOR_ACCEPTANCE
