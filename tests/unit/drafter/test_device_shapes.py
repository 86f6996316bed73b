"""Whatever a plan asks for, a drafter on a device drafts in one of the shapes that it captured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_drafter.gpu.outcome_drafting import OWN_BLOCKS
from outrider_drafter.gpu.paged_kv import BLOCK_TOKENS
from outrider_drafter.gpu.shapes import (
    BATCH_SIZES,
    CHAIN_LENGTHS,
    MODEL_CHAIN_LENGTHS,
    TREES,
    Buckets,
    Shape,
    family,
    fitted,
    most_branches,
    most_sessions,
    nodes_of,
    path_rows,
    score_family,
)
from outrider_drafter.state.outcomes import BRANCH_SIZES

from outrider.engine.device.graphs.shapes import TREE_BUCKETS

LENGTHS = st.sampled_from([CHAIN_LENGTHS, MODEL_CHAIN_LENGTHS])


@given(LENGTHS, st.integers(1, 256), st.integers(1, 32), st.integers(1, 256), st.booleans())
def test_every_shape_is_fitted_into_the_family(
    chains: tuple[int, ...], nodes: int, top_k: int, depth: int, with_law: bool
) -> None:
    shape = Shape(nodes, top_k, min(depth, nodes), with_law and top_k == 1)
    found = fitted(shape, chains)
    assert found in {shape for shape, _ in family(chains)}
    assert (found.top_k == 1) == (top_k == 1 or nodes < min(TREES))
    assert found.with_law == shape.with_law


def test_chains_are_not_shorter_than_asked_and_trees_not_larger() -> None:
    for length in range(1, CHAIN_LENGTHS[-1] + 1):
        assert fitted(Shape(length, 1, length), CHAIN_LENGTHS).depth >= length
        # Steps that are forwards of a model are not cut off again where it can be helped.
        assert fitted(Shape(length, 1, length), MODEL_CHAIN_LENGTHS).depth <= max(length + 1, 2)
    assert fitted(Shape(100, 1, 100), CHAIN_LENGTHS).depth == CHAIN_LENGTHS[-1]
    for nodes in range(1, min(TREES)):
        # More nodes than its plan has, a verifier may refuse; a chain is cut.
        assert fitted(Shape(nodes, 4, 2), CHAIN_LENGTHS).top_k == 1
        assert fitted(Shape(nodes, 4, 2), CHAIN_LENGTHS).depth >= nodes
    for nodes in range(min(TREES), 200):
        assert fitted(Shape(nodes, 4, 6), CHAIN_LENGTHS).num_nodes <= nodes


def test_a_tree_and_its_root_fill_the_rows_that_a_verifier_runs() -> None:
    """Rows that nobody drafted for are forwarded like others."""
    assert {1 + nodes for nodes in TREES} <= set(TREE_BUCKETS)
    levels = {7: 4, 16: 5, 32: 6, 64: 7}
    assert {nodes: fitted(Shape(nodes, 4, 3), CHAIN_LENGTHS).depth for nodes in TREES} == levels


def test_no_shape_is_captured_twice() -> None:
    assert len(list(family(CHAIN_LENGTHS))) == len(set(family(CHAIN_LENGTHS)))


def test_look_ahead_captures_fewer_graphs_than_drafting() -> None:
    drafts = sum(
        len(Buckets().rows) * sum(size <= most_sessions(shape) for size in BATCH_SIZES)
        for shape, _ in family(CHAIN_LENGTHS)
    )
    branches = sum(
        sum(size <= most_branches(shape) for size in BRANCH_SIZES)
        for shape, _ in family(CHAIN_LENGTHS)
    )
    scores = sum(len(levels.sizes) * len(Buckets().score_rows) for levels, _ in score_family())
    assert branches + scores < drafts
    assert len(list(score_family())) == len(set(score_family()))


def test_every_draft_of_the_family_is_scored_as_a_whole() -> None:
    captured = {nodes for nodes, _ in score_family()}
    for shape, _ in family(CHAIN_LENGTHS):
        nodes = nodes_of(shape.num_nodes, chain=shape.top_k == 1)
        assert nodes in captured
        assert (nodes.num_nodes, nodes.depth) == (shape.num_nodes, shape.depth)


def test_a_branch_finds_room_in_its_own_blocks_wherever_the_prefix_ends() -> None:
    for shape, _ in family(CHAIN_LENGTHS):
        rows = BLOCK_TOKENS - 1 + path_rows(shape) + shape.draft_rows
        assert rows <= OWN_BLOCKS * BLOCK_TOKENS
        assert path_rows(shape) > shape.depth
