"""Where nodes of proposals are placed, and which rows branches take, against plain loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outrider_drafter.gpu.scoring_layout import NO_ROW, ProposalRange, ScoredRows
from outrider_drafter.state.outcomes import NodeIndex

from outrider.spec.tree import ROOT, DraftTree, path


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any parents before their children; log-probs that fall along every path."""
    count = draw(st.integers(0, 80))
    nearness = draw(st.integers(1, 40))
    parents = [draw(st.integers(max(ROOT, i - nearness), i - 1)) for i in range(count)]
    falls = [draw(st.integers(0, 3)) / 4 for _ in range(count)]
    logprobs: list[float] = []
    for parent, fall in zip(parents, falls, strict=True):
        logprobs.append((0.0 if parent == ROOT else logprobs[parent]) - fall)
    return DraftTree(
        tokens=np.arange(100, 100 + count, dtype=np.int32),
        parents=np.array(parents, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
    )


@given(trees())
def test_the_likeliest_nodes_are_placed_each_below_its_parent(tree: DraftTree) -> None:
    placed = ProposalRange.of_tree(tree)
    places = placed.node_rows
    assert places[0] == 0 and len(places) == 1 + len(tree)
    there = places[1:] != NO_ROW
    count = np.count_nonzero(there)
    assert sorted(places[1:][there].tolist()) == list(range(1, 1 + count))
    assert count == min(len(tree), placed.nodes.num_nodes)
    if count == len(tree):
        return
    for node in np.flatnonzero(there).tolist():
        assert places[tree.parents[node] + 1] != NO_ROW
    if placed.nodes.is_chain:
        assert there[:count].all()
    else:
        assert tree.logprobs[there].min() >= tree.logprobs[~there].max()


@given(st.lists(trees(), min_size=1, max_size=3))
def test_a_filled_batch_holds_each_node_behind_its_parent(found: list[DraftTree]) -> None:
    for tree in found:
        placed, row, batch = ProposalRange.of_tree(tree), 1, 3
        tokens = np.full((batch, placed.nodes.num_nodes), -1, dtype=np.int32)
        parents = np.full_like(tokens, -7)
        placed.write_row(row, tokens, parents)
        assert (tokens[[0, 2]] == -1).all() and (parents[[0, 2]] == -7).all()
        assert np.count_nonzero(tokens >= 0) == np.count_nonzero(placed.node_rows[1:] != NO_ROW)
        for node in np.flatnonzero(placed.node_rows[1:] != NO_ROW).tolist():
            slot = int(placed.node_rows[node + 1]) - 1
            assert tokens[row, slot] == tree.tokens[node]
            above, parent = int(parents[row, slot]), int(tree.parents[node])
            assert above < slot
            if parent == ROOT:
                assert above == ROOT
            else:
                assert tokens[row, above] == tree.tokens[parent]


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_paths_are_those_of_the_trees(found: list[DraftTree], data: st.DataObject) -> None:
    rows = [1000 * i + np.arange(1 + len(tree)) for i, tree in enumerate(found)]
    for own in rows:
        own[data.draw(st.integers(0, len(own) - 1))] = NO_ROW
    outcomes = data.draw(
        st.lists(
            st.integers(0, len(found) - 1).flatmap(
                lambda live: st.tuples(
                    st.just(live), st.integers(ROOT, len(found[live]) - 1), st.integers(0, 9)
                )
            ),
            min_size=1,
            max_size=12,
        )
    )
    places = ScoredRows(NodeIndex.of_trees(found), np.concatenate(rows))
    paths = places.find_paths(*np.array(outcomes, dtype=np.int64).T)
    for i, (live, node, token) in enumerate(outcomes):
        nodes = path(found[live].parents, node)
        assert paths.is_scored[i] == (rows[live][node + 1] != NO_ROW)
        assert paths.depths[i] == len(nodes)
        own = [*found[live].tokens[list(nodes)].tolist(), token]
        assert paths.tokens[i].tolist() == own + [-1] * (paths.tokens.shape[1] - len(own))
        held = [rows[live][above + 1] for above in (ROOT, *nodes)]
        assert paths.rows[i, : len(own)].tolist() == held
