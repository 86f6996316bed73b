from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.spec.tree import (
    ROOT,
    DraftTree,
    ancestor_mask,
    children,
    depths,
    is_chain,
    path,
    validate_tree,
)

VOCAB = 1000


@st.composite
def parent_lists(draw: st.DrawFn) -> NDArray[np.int32]:
    count = draw(st.integers(0, 24))
    return np.array([draw(st.integers(ROOT, i - 1)) for i in range(count)], dtype=np.int32)


def _tree(parents: NDArray[np.int32]) -> DraftTree:
    """A valid tree of that shape: all tokens differ, log-probs fall with the depth."""
    return DraftTree(
        tokens=np.arange(len(parents), dtype=np.int32),
        parents=parents,
        logprobs=(-0.5 * depths(parents)).astype(np.float32),
    )


@given(parent_lists())
def test_utilities_agree_with_walking_up_from_every_node(parents: NDArray[np.int32]) -> None:
    mask, deep, below = ancestor_mask(parents), depths(parents), children(parents)
    for node in range(len(parents)):
        walk, up = [], node
        while up != ROOT:
            walk.append(up)
            up = int(parents[up])
        assert path(parents, node) == tuple(reversed(walk))
        assert deep[node] == len(walk)
        assert set(np.flatnonzero(mask[node]).tolist()) == set(walk)
        assert node in below[int(parents[node]) + 1]
    assert sorted(n for siblings in below for n in siblings) == list(range(len(parents)))
    assert all(siblings == sorted(siblings) for siblings in below)
    assert path(parents, ROOT) == ()


@given(parent_lists())
def test_a_chain_is_a_tree_whose_mask_is_causal(parents: NDArray[np.int32]) -> None:
    causal = np.tril(np.ones((len(parents), len(parents)), dtype=bool))
    assert is_chain(parents) == bool((ancestor_mask(parents) == causal).all())


@given(parent_lists())
def test_well_formed_trees_are_valid(parents: NDArray[np.int32]) -> None:
    validate_tree(_tree(parents), vocab_size=VOCAB, max_nodes=24)


def _i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=8))
def test_a_chain_of_tokens_is_a_valid_tree(tokens: list[int]) -> None:
    tree = DraftTree.chain(_i32(*tokens))
    validate_tree(tree, vocab_size=VOCAB, max_nodes=8)
    assert tree.tokens.tolist() == tokens
    assert is_chain(tree.parents)
    assert not tree.logprobs.any()


GOOD = DraftTree(_i32(5, 6, 5), _i32(-1, -1, 0), _f32(-0.1, -2.0, -0.1))


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, tokens=_i32(5, 6)),
        replace(GOOD, tokens=GOOD.tokens.astype(np.int64)),
        replace(GOOD, tokens=_i32(5, 6, -1)),
        replace(GOOD, tokens=_i32(5, VOCAB, 5)),
        replace(GOOD, tokens=_i32(5, 5, 6)),
        replace(GOOD, tokens=GOOD.tokens[:, None]),
        replace(GOOD, parents=_i32(-1, -1, 2)),
        replace(GOOD, parents=_i32(-1, 2, 0)),
        replace(GOOD, parents=_i32(-1, -2, 0)),
        replace(GOOD, parents=_i32(-1, -1)),
        replace(GOOD, logprobs=_f32(0.5, -2.0, -0.1)),
        replace(GOOD, logprobs=_f32(-0.1, -2.0, -0.05)),
        replace(GOOD, logprobs=_f32(-0.1, float("nan"), -0.2)),
        replace(GOOD, logprobs=np.zeros(3, dtype="f8")),
    ],
)
def test_a_malformed_tree_is_refused(bad: DraftTree) -> None:
    validate_tree(GOOD, vocab_size=VOCAB, max_nodes=3)
    with pytest.raises(InvalidMessageError):
        validate_tree(bad, vocab_size=VOCAB, max_nodes=3)


def test_a_tree_over_the_node_bound_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="at most 2"):
        validate_tree(GOOD, vocab_size=VOCAB, max_nodes=2)


def test_an_empty_tree_is_valid() -> None:
    validate_tree(_tree(_i32()), vocab_size=VOCAB, max_nodes=0)
