"""Whatever a plan asks for, a drafter on a device drafts in one of the shapes that it captured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_drafter.gpu.outcome_drafting import BLOCKS_PER_OUTCOME
from outrider_drafter.gpu.paged_kv import BLOCK_TOKENS
from outrider_drafter.gpu.shapes import (
    BATCH_SIZES,
    CHAIN_LENGTHS,
    MODEL_CHAIN_LENGTHS,
    TREES,
    Buckets,
    DraftTreeShape,
    draft_shapes,
    fit_shape,
    max_outcomes,
    max_path_rows,
    max_sessions,
    proposal_shape,
    scoring_shapes,
)
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES

from outrider.engine.device.graphs.shapes import TREE_BUCKETS

LENGTHS = st.sampled_from([CHAIN_LENGTHS, MODEL_CHAIN_LENGTHS])


@given(LENGTHS, st.integers(1, 256), st.integers(1, 32), st.integers(1, 256), st.booleans())
def test_every_shape_is_fitted_into_the_family(
    chains: tuple[int, ...], nodes: int, top_k: int, depth: int, has_distribution: bool
) -> None:
    shape = DraftTreeShape(nodes, top_k, min(depth, nodes), has_distribution and top_k == 1)
    found = fit_shape(shape, chains)
    assert found in {shape for shape, _ in draft_shapes(chains)}
    assert (found.top_k == 1) == (top_k == 1 or nodes < min(TREES))
    assert found.has_distribution == shape.has_distribution


def test_chains_are_not_shorter_than_asked_and_trees_not_larger() -> None:
    for length in range(1, CHAIN_LENGTHS[-1] + 1):
        assert fit_shape(DraftTreeShape(length, 1, length), CHAIN_LENGTHS).depth >= length
        # Steps that are forwards of a model are not cut off again where it can be helped.
        assert fit_shape(DraftTreeShape(length, 1, length), MODEL_CHAIN_LENGTHS).depth <= max(
            length + 1, 2
        )
    assert fit_shape(DraftTreeShape(100, 1, 100), CHAIN_LENGTHS).depth == CHAIN_LENGTHS[-1]
    for nodes in range(1, min(TREES)):
        # More nodes than its plan has, a verifier may refuse; a chain is cut.
        assert fit_shape(DraftTreeShape(nodes, 4, 2), CHAIN_LENGTHS).top_k == 1
        assert fit_shape(DraftTreeShape(nodes, 4, 2), CHAIN_LENGTHS).depth >= nodes
    for nodes in range(min(TREES), 200):
        assert fit_shape(DraftTreeShape(nodes, 4, 6), CHAIN_LENGTHS).num_nodes <= nodes


def test_a_tree_and_its_root_fill_the_rows_that_a_verifier_runs() -> None:
    """Rows that nobody drafted for are forwarded like others."""
    assert {1 + nodes for nodes in TREES} <= set(TREE_BUCKETS)
    levels = {7: 4, 16: 5, 32: 6, 64: 7}
    assert {
        nodes: fit_shape(DraftTreeShape(nodes, 4, 3), CHAIN_LENGTHS).depth for nodes in TREES
    } == levels


def test_no_shape_is_captured_twice() -> None:
    assert len(list(draft_shapes(CHAIN_LENGTHS))) == len(set(draft_shapes(CHAIN_LENGTHS)))


def test_look_ahead_captures_fewer_graphs_than_drafting() -> None:
    drafts = sum(
        len(Buckets().rows) * sum(size <= max_sessions(shape) for size in BATCH_SIZES)
        for shape, _ in draft_shapes(CHAIN_LENGTHS)
    )
    branches = sum(
        sum(size <= max_outcomes(shape) for size in OUTCOME_BATCH_SIZES)
        for shape, _ in draft_shapes(CHAIN_LENGTHS)
    )
    scores = sum(
        len(levels.batch_buckets) * len(Buckets().score_rows) for levels, _ in scoring_shapes()
    )
    assert branches + scores < drafts
    assert len(list(scoring_shapes())) == len(set(scoring_shapes()))


def test_every_draft_of_the_family_is_scored_as_a_whole() -> None:
    captured = {nodes for nodes, _ in scoring_shapes()}
    for shape, _ in draft_shapes(CHAIN_LENGTHS):
        nodes = proposal_shape(shape.num_nodes, chain=shape.top_k == 1)
        assert nodes in captured
        assert (nodes.num_nodes, nodes.depth) == (shape.num_nodes, shape.depth)


def test_a_branch_finds_room_in_its_own_blocks_wherever_the_prefix_ends() -> None:
    for shape, _ in draft_shapes(CHAIN_LENGTHS):
        rows = BLOCK_TOKENS - 1 + max_path_rows(shape) + shape.draft_rows
        assert rows <= BLOCKS_PER_OUTCOME * BLOCK_TOKENS
        assert max_path_rows(shape) > shape.depth
