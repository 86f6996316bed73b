"""Walks along drafts: what is settled may stand, and every mask is that of its place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL_TOKENS, small_id_set
from outrider.grammar.draft_masks import ChainTruncation, ConstrainedTree, masks_of_trees, run_walks
from outrider.spec.tree import ROOT, path
from tests.fakes.scripted_grammar import END, Scripted

IDS = st.integers(-1, 11)
ROUNDS = st.lists(IDS, max_size=6)


class Odd(Scripted):
    """A language in which what may follow is a matter of chance; END ends it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def _allowed_tokens(self, *tokens: int) -> list[int]:
        rng = np.random.default_rng([self._seed, *(t + 2 for t in (*self.path, *tokens))])
        count = int(rng.choice([1, 1, 2, 4]))
        return sorted(rng.choice(12, count, replace=False).tolist())

    def legal_behind(self, tokens: Sequence[int]) -> list[int] | None:
        """What may follow these tokens; None if they cannot be, or nothing follows them."""
        for count, token in enumerate(tokens):
            if token == END or token not in self._allowed_tokens(*tokens[:count]):
                return None
        return self._allowed_tokens(*tokens)


@given(
    seed=st.integers(0, 999),
    drafted=ROUNDS,
    others=st.lists(st.lists(IDS, max_size=4), min_size=6, max_size=6),
)
def test_a_chain_is_settled_as_far_as_it_fits_and_mended_once(
    seed: int, drafted: list[int], others: list[list[int]]
) -> None:
    language = Odd(seed)
    fit = ChainTruncation(language, others=others)
    run_walks([(language, fit.truncate(drafted))])
    fit.close()
    assert language.path == []
    settled, fresh = list[int](), True
    while len(settled) < len(drafted):
        here = language.legal_behind(settled)
        if here is None:
            break
        token = drafted[len(settled)] if fresh else -1
        if token not in here:
            instead = here if len(here) == 1 else []
            if fresh and not instead:
                instead = [i for i in others[len(settled)] if i in here]
            if not instead:
                break
            token, fresh = instead[0], False
        settled.append(token)
    assert fit.tokens == settled


@given(
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3, unique=True),
    nodes=st.lists(st.tuples(IDS, st.integers(0, 20)), max_size=9),
)
def test_masks_of_trees_are_those_of_their_places(
    seeds: list[int], nodes: list[tuple[int, int]]
) -> None:
    languages = [Odd(seed) for seed in seeds]
    tokens = np.array([token for token, _ in nodes], dtype=np.int32)
    parents = np.array([at % (n + 1) - 1 for n, (_, at) in enumerate(nodes)], dtype=np.int32)
    found = masks_of_trees([ConstrainedTree(language, tokens, parents) for language in languages])
    for language, masks in zip(languages, found, strict=True):
        assert language.path == []
        for node in range(ROOT, len(nodes)):
            said = [int(tokens[at]) for at in path(parents, node)] if node != ROOT else []
            allowed_tokens = language.legal_behind(said)
            assert_is(masks[node + 1], allowed_tokens)


def assert_is(mask: NDArray[np.uint32], allowed_tokens: list[int] | None) -> None:
    """Below what is not legal, and behind an end, a mask says anything."""
    if allowed_tokens is None:
        assert (mask == ALL_TOKENS).all()
    else:
        assert small_id_set(mask, 12) == allowed_tokens
