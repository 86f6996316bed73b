"""Tree growth as a state machine, without any model."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_drafter.proposers.interface import ProposedDraft
from outrider_drafter.proposers.tree_growth import (
    BeamGrowth,
    CandidateRows,
    ChainGrowth,
    StaticGrowth,
    StepFrontier,
    TreeGrowth,
    make_growth,
    static_shape,
)

from outrider.spec.draft_distribution import DistributionEntries
from outrider.spec.plan import DraftMethod, SpeculationPlan, default_depth
from outrider.spec.tree import validate_tree

Guess = Callable[[tuple[int, ...]], list[tuple[int, float]]]
"""Candidates (token, logprob) below a path, best first."""


def run(
    growth: TreeGrowth, guess: Guess, *, distributions: bool = False
) -> tuple[ProposedDraft, int]:
    """Feed a growth from `guess`; the draft, and how many rows were run."""
    paths: list[tuple[int, ...]] = [()]
    rows = 0
    while True:
        below = [guess(path)[: growth.top_k] for path in paths]
        children = CandidateRows(
            tokens=np.array([[t for t, _ in row] for row in below]),
            logprobs=np.array([[s for _, s in row] for row in below], dtype=np.float32),
            distributions=[law_of(row) for row in below] if distributions else (),
        )
        frontier: StepFrontier = growth.add_level(children)
        if not frontier.tokens:
            return growth.finish_draft(), rows
        assert len(frontier.tokens) == len(frontier.parents)
        paths = [
            (*paths[parent], token)
            for token, parent in zip(frontier.tokens, frontier.parents, strict=True)
        ]
        assert [growth.path_to(i) for i in range(len(paths))] == paths
        rows += len(paths)
        assert rows <= growth.max_rows


def law_of(row: list[tuple[int, float]]) -> DistributionEntries:
    ids = np.array(sorted(t for t, s in row if s > -math.inf), dtype=np.int32)
    return ids, np.full(len(ids), 7, dtype=np.uint16)


def uniform(k: int, logprob: float) -> Guess:
    return lambda path: [(10 * len(path) + i, logprob) for i in range(k)]


def spread(path: tuple[int, ...]) -> list[tuple[int, float]]:
    """Irregular but reproducible log-probs."""
    noise = np.random.default_rng([len(path), *path]).random(8)
    order = sorted((math.log(x / noise.sum()), i) for i, x in enumerate(noise))
    return [(i, logprob) for logprob, i in reversed(order)]


def assert_valid(draft: ProposedDraft, max_nodes: int) -> None:
    tree = draft.tree
    validate_tree(tree, vocab_size=1000, max_nodes=max_nodes)
    assert all(p < i for i, p in enumerate(tree.parents))
    for i, p in enumerate(tree.parents):
        assert tree.logprobs[i] <= (0.0 if p < 0 else tree.logprobs[p])


def test_a_chain_takes_the_only_candidate_of_each_level() -> None:
    draft, rows = run(ChainGrowth(4), uniform(1, -0.5))
    assert draft.tree.tokens.tolist() == [0, 10, 20, 30]
    assert draft.tree.parents.tolist() == [-1, 0, 1, 2]
    assert draft.tree.logprobs.tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert rows == 3
    assert_valid(draft, 4)


def test_a_beam_of_one_is_the_chain() -> None:
    beam, beam_rows = run(BeamGrowth(num_nodes=5, top_k=1, depth=5), spread)
    chain, chain_rows = run(ChainGrowth(5), spread)
    assert beam.tree.tokens.tolist() == chain.tree.tokens.tolist()
    assert beam.tree.parents.tolist() == chain.tree.parents.tolist()
    assert beam_rows == chain_rows == 4


def naive_tree(guess: Guess, *, nodes: int, k: int, depth: int) -> list[tuple[int, ...]]:
    """The tree without pruning: the paths of the best candidates, in candidate order."""
    candidates: list[tuple[np.float32, tuple[int, ...]]] = []
    frontier: list[tuple[np.float32, tuple[int, ...]]] = [(np.float32(0.0), ())]
    for _ in range(depth):
        level = [
            (score + np.float32(logprob), (*path, token))
            for score, path in frontier
            for token, logprob in guess(path)[:k]
        ]
        candidates += level
        frontier = sorted(level, key=lambda c: -c[0])[:k]
    best = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[:nodes]
    return [candidates[i][1] for i in sorted(best)]


@pytest.mark.parametrize(("nodes", "k", "depth"), [(1, 3, 2), (8, 4, 3), (20, 5, 4), (60, 8, 5)])
def test_leaving_out_hopeless_nodes_changes_no_tree(nodes: int, k: int, depth: int) -> None:
    draft, rows = run(BeamGrowth(num_nodes=nodes, top_k=k, depth=depth), spread)
    assert paths_of(draft) == naive_tree(spread, nodes=nodes, k=k, depth=depth)
    assert rows <= k * (depth - 1)
    assert_valid(draft, nodes)


def paths_of(draft: ProposedDraft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tree.tokens, draft.tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    return paths


@pytest.mark.parametrize("logprob", [0.0, -0.0, -1e-30, -1.0])
def test_equal_scores_leave_no_child_without_its_parent(logprob: float) -> None:
    for nodes in range(1, 30):
        draft, _ = run(BeamGrowth(num_nodes=nodes, top_k=4, depth=4), uniform(4, logprob))
        assert len(draft.tree) == nodes
        assert_valid(draft, nodes)
        assert paths_of(draft) == naive_tree(uniform(4, logprob), nodes=nodes, k=4, depth=4)


def test_certain_children_of_an_unlikely_parent_never_outrank_it() -> None:
    def guess(path: tuple[int, ...]) -> list[tuple[int, float]]:
        return [(len(path), -20.0 if not path else 0.0), (90 + len(path), -21.0)]

    for nodes in range(1, 12):
        draft, _ = run(BeamGrowth(num_nodes=nodes, top_k=2, depth=6), guess)
        assert_valid(draft, nodes)


def test_a_log_prob_above_zero_counts_as_zero() -> None:
    draft, _ = run(BeamGrowth(num_nodes=6, top_k=2, depth=3), uniform(2, 0.25))
    assert_valid(draft, 6)
    assert draft.tree.logprobs.max() <= 0.0


@given(st.integers(1, 40), st.integers(2, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_any_scores_give_a_valid_tree(nodes: int, k: int, depth: int, seed: int) -> None:
    levels = np.array([0.0, -0.0, -1.0, -1e30, -np.inf, np.nan], dtype=np.float32)

    def guess(path: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = np.random.default_rng([seed, *path])
        return [(i, float(x)) for i, x in enumerate(rng.choice(levels, k))]

    draft, _ = run(BeamGrowth(num_nodes=nodes, top_k=k, depth=depth), guess)
    assert len(draft.tree) <= nodes
    assert np.isfinite(draft.tree.logprobs).all()
    if len(draft.tree):
        assert_valid(draft, nodes)


def test_the_static_shape_does_not_depend_on_the_drawn_tokens() -> None:
    shapes = set()
    for seed in range(5):

        def guess(path: tuple[int, ...], seed: int = seed) -> list[tuple[int, float]]:
            rng = np.random.default_rng([seed, *path])
            return [(int(t), float(-9.0 * rng.random())) for t in rng.permutation(50)[:4]]

        draft, _ = run(StaticGrowth(static_shape(20, 4, 4)), guess, distributions=True)
        assert_valid(draft, 20)
        shapes.add(tuple(draft.tree.parents.tolist()))
    assert len(shapes) == 1


def test_the_static_shape_has_all_nodes_within_its_bounds() -> None:
    shape = static_shape(32, 4, 6)
    assert len(shape.parents) == 32
    assert shape.depth <= 6
    assert max(shape.ranks) < 4
    for place, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        assert parent < place
        siblings = [r for p, r in zip(shape.parents, shape.ranks, strict=True) if p == parent]
        assert siblings == list(range(len(siblings))) and rank in siblings
    assert static_shape(4, 1, 4).parents == (-1, 0, 1, 2)


def test_a_static_tree_ships_the_law_of_every_node_with_children() -> None:
    draft, _ = run(StaticGrowth(static_shape(12, 3, 3)), spread, distributions=True)
    distribution, tree = draft.distribution, draft.tree
    assert distribution is not None
    sizes = np.diff(distribution.offsets)
    assert len(sizes) == len(tree) + 1
    parents = set(tree.parents.tolist())
    for slot, size in enumerate(sizes.tolist()):
        assert (size > 0) == (slot - 1 in parents)
    for node, parent in enumerate(tree.parents.tolist()):
        ids = distribution.ids[distribution.offsets[parent + 1] : distribution.offsets[parent + 2]]
        assert tree.tokens[node] in ids


def test_a_law_with_few_ids_leaves_places_empty_and_stays_closed() -> None:
    def guess(path: tuple[int, ...]) -> list[tuple[int, float]]:
        certain = (3 + len(path), -0.1)
        return [certain, (0, -math.inf), (0, -math.inf)]

    draft, _ = run(StaticGrowth(static_shape(15, 3, 4)), guess, distributions=True)
    assert draft.tree.tokens.tolist() == [3, 4, 5, 6]
    assert draft.tree.parents.tolist() == [-1, 0, 1, 2]
    assert draft.distribution is not None
    assert draft.distribution.ids.tolist() == [3, 4, 5, 6]
    assert_valid(draft, 15)


def plan(nodes: int, k: int, depth: int = 0) -> SpeculationPlan:
    return SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=nodes, top_k=k, depth=depth)


def test_drafts_end_where_the_session_must_end() -> None:
    chain = make_growth(plan(8, 1), room=3, has_distribution=False)
    assert isinstance(chain, ChainGrowth) and chain.depth == 3
    tree = make_growth(plan(32, 4), room=2, has_distribution=False)
    assert isinstance(tree, BeamGrowth) and tree.depth == 2
    assert make_growth(plan(8, 1), room=0, has_distribution=False) is None
    assert make_growth(plan(0, 1), room=9, has_distribution=False) is None


def test_the_rejection_rule_always_gets_a_static_tree() -> None:
    assert isinstance(make_growth(plan(4, 1), room=9, has_distribution=True), StaticGrowth)
    assert isinstance(make_growth(plan(32, 4), room=9, has_distribution=True), StaticGrowth)


def test_the_plan_chooses_the_depth_or_leaves_it_to_the_number_of_nodes() -> None:
    chosen = make_growth(plan(32, 4, depth=3), room=99, has_distribution=False)
    assert chosen is not None and chosen.depth == 3
    free = make_growth(plan(32, 4), room=99, has_distribution=False)
    assert free is not None and free.depth == default_depth(32) == 6
