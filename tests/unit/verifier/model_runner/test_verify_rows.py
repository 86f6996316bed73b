"""Rows: depth limits, trimming of trees and distributions, masks, and where an emission is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.model_runner.batch import tree_mask, trim_draft, truncate_emission

from outrider.spec.draft_distribution import (
    DistributionEntries,
    make_distribution,
    validate_distribution,
)
from outrider.spec.tree import ancestor_mask, children, depths, validate_tree
from outrider.wire.messages import FinishReason
from tests.fakes.scripted_drafter import make_tree

NO_STOP: frozenset[int] = frozenset()


def test_a_tree_that_fits_is_left_alone() -> None:
    tree = make_tree([1, 2, 3], [-1, -1, 0])
    draft = trim_draft(tree, None, 2)
    assert draft.tree is tree


def test_trimming_renumbers_parents() -> None:
    tree = make_tree([1, 2, 3, 4, 5], [-1, 0, 1, -1, 3])
    draft = trim_draft(tree, None, 1)
    assert draft.tree.tokens.tolist() == [1, 4]
    assert draft.tree.parents.tolist() == [-1, -1]


def test_trimming_to_depth_zero_leaves_no_nodes() -> None:
    distribution = make_distribution(1, {0: (np.array([1], np.int32), np.array([9], np.uint16))})
    draft = trim_draft(make_tree([1]), distribution, 0)
    assert len(draft.tree) == 0
    assert draft.distribution is not None
    validate_distribution(draft.distribution, draft.tree, 10)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 10)))]


@given(trees(), st.integers(0, 6))
def test_a_trimmed_tree_and_its_law_are_valid_and_as_deep_as_allowed(
    parents: list[int], limit: int
) -> None:
    # Tokens are the node numbers, so siblings differ and every node can be told.
    tree = make_tree(list(range(len(parents))), parents)
    slots: dict[int, DistributionEntries] = {
        slot: (np.array(below, np.int32), np.arange(1, len(below) + 1).astype(np.uint16))
        for slot, below in enumerate(children(parents))
        if below
    }
    draft = trim_draft(tree, make_distribution(len(parents), slots), limit)
    validate_tree(draft.tree, vocab_size=64, max_nodes=64)
    assert draft.distribution is not None
    validate_distribution(draft.distribution, draft.tree, 64)
    assert draft.depths.tolist() == depths(draft.tree.parents).tolist()
    expected = [i for i, d in enumerate(depths(parents).tolist()) if d <= limit]
    assert draft.tree.tokens.tolist() == expected


def test_a_chain_needs_no_mask() -> None:
    assert tree_mask(make_tree([1, 2, 3])) is None


def test_a_tree_row_sees_the_root_itself_and_its_ancestors() -> None:
    tree = make_tree([1, 2, 3], [-1, -1, 0])
    mask = tree_mask(tree)
    assert mask is not None
    assert mask[:, 0].all()
    assert not mask[0, 1:].any()
    assert np.array_equal(mask[1:, 1:], ancestor_mask(tree.parents))


def test_an_emission_ends_with_its_first_stop_token() -> None:
    stop = frozenset({7, 8})
    assert truncate_emission((1, 8, 7), stop_ids=stop, remaining=9) == (
        (1, 8),
        FinishReason.STOP_TOKEN,
    )


def test_a_stop_token_in_the_last_place_is_a_stop_and_not_a_length() -> None:
    cut = truncate_emission((1, 7), stop_ids=frozenset({7}), remaining=2)
    assert cut == ((1, 7), FinishReason.STOP_TOKEN)


def test_an_emission_ends_at_the_budget() -> None:
    assert truncate_emission((1, 2), stop_ids=NO_STOP, remaining=2) == ((1, 2), FinishReason.LENGTH)
    assert truncate_emission((1, 2), stop_ids=NO_STOP, remaining=3) == ((1, 2), None)
