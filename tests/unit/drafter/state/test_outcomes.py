"""Which outcomes are chosen, against a slow reading of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_drafter.look_ahead.calibration import OutcomeCalibration, RankCalibration
from outrider_drafter.state.outcomes import (
    OUTCOME_BATCH_SIZES,
    CandidateLayout,
    NodeIndex,
    best_outcomes,
    follow_verdict,
    num_worthwhile,
)

from outrider.spec.digest import extend_digest
from outrider.spec.tree import DraftTree, depths, path


def random_case(
    seed: int, *, nodes: int = 12, width: int = 8, vocab: int = 40
) -> tuple[DraftTree, NDArray[np.int32], NDArray[np.float32]]:
    """A tree, candidates [1 + n, c] of its places, and their log-probs, best first."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(vocab)[:width] for _ in range(nodes + 1)]).astype(np.int32)
    probs = np.sort(rng.dirichlet([0.3] * (width + 1), nodes + 1)[:, 1:])[:, ::-1]
    parents: list[int] = []
    drafted: list[int] = []
    for node in range(nodes):
        parent = int(rng.integers(-1, node)) if node else -1
        taken = [drafted[i] for i in range(node) if parents[i] == parent]
        # Mostly a candidate, sometimes another id.
        free = [t for t in tokens[parent + 1].tolist() if t not in taken]
        other = [t for t in range(vocab) if t not in taken]
        pool = free if free and rng.random() < 0.8 else other
        drafted.append(int(rng.choice(pool)))
        parents.append(parent)
    tree = DraftTree(
        np.array(drafted, np.int32), np.array(parents, np.int32), np.zeros(nodes, np.float32)
    )
    return tree, tokens, np.log(probs).astype(np.float32)


def slow_gains(
    tree: DraftTree, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> dict[tuple[int, int], float]:
    """P(path ends here) x P(token next), of everything that is an outcome."""
    probs = np.exp(logprobs.astype(np.float64))
    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    gains: dict[tuple[int, int], float] = {}
    for place in range(len(tree) + 1):
        reach = 1.0
        for node in path(tree.parents, place - 1):
            parent, token = pairs[node]
            row = tokens[parent + 1].tolist()
            known = probs[parent + 1, row.index(token)] if token in row else None
            reach *= 1.0 - probs[parent + 1].sum() if known is None else known
        for column, token in enumerate(tokens[place].tolist()):
            if (place - 1, token) not in pairs:
                gains[place - 1, token] = reach * probs[place, column]
    return gains


@pytest.mark.parametrize("seed", range(8))
def test_the_best_outcomes_of_the_whole_proposal_are_chosen(seed: int) -> None:
    tree, tokens, logprobs = random_case(seed)
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    chosen = best_outcomes(
        layout, OutcomeCalibration().expected_gains(layout, logprobs), 0, room=99, count=10
    )
    expected = sorted(slow_gains(tree, tokens, logprobs).items(), key=lambda item: -item[1])[:10]
    found = list(zip((chosen.places - 1).tolist(), chosen.tokens.tolist(), strict=True))
    assert found == [outcome for outcome, _ in expected]
    np.testing.assert_allclose(chosen.gains, [gain for _, gain in expected], rtol=1e-6)


@pytest.mark.parametrize(
    "predictor", [OutcomeCalibration(), RankCalibration()], ids=["shares", "fixed"]
)
def test_no_child_is_an_outcome_and_none_leaves_less_room_than_a_draft_needs(
    predictor: OutcomeCalibration | RankCalibration,
) -> None:
    tree, tokens, logprobs = random_case(3)
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    gains = predictor.expected_gains(layout, logprobs)
    children = set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(best_outcomes(layout, gains, 0, room=99, count=10_000).places) == int(
        (~layout.is_child).sum()
    )
    for room in range(5):
        chosen = best_outcomes(layout, gains, 0, room=room, count=10_000)
        found = set(zip((chosen.places - 1).tolist(), chosen.tokens.tolist(), strict=True))
        assert not found & children
        # The path, its token, and one level below it.
        deepest = [0, *depths(tree.parents).tolist()]
        assert all(deepest[node + 1] + 2 <= room for node, _ in found)
        assert bool(found) == (room >= 2)


def test_candidates_that_are_none_are_never_chosen() -> None:
    tree, tokens, logprobs = random_case(4)
    tokens[:, 3:], logprobs[:, 3:] = -1, -np.inf
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    trained = OutcomeCalibration()
    trained.learn_from_verdict(
        layout, logprobs, follow_verdict(layout, 0, tree.tokens[:1].tolist())
    )
    for predictor in (OutcomeCalibration(), trained, RankCalibration()):
        chosen = best_outcomes(
            layout, predictor.expected_gains(layout, logprobs), 0, room=99, count=10_000
        )
        assert len(chosen.tokens) and (chosen.tokens >= 0).all()


def test_no_more_are_chosen_than_were_asked_for_and_ties_go_to_the_first() -> None:
    tree, tokens, _ = random_case(5)
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    gains = np.ones(tokens.shape)
    chosen = best_outcomes(layout, gains, 0, room=99, count=5)
    places = np.argwhere(~layout.is_child)[:5]
    assert chosen.places.tolist() == places[:, 0].tolist()
    assert chosen.tokens.tolist() == [tokens[place, column] for place, column in places]
    assert not len(best_outcomes(layout, gains, 0, room=99, count=0).places)


def test_a_verdict_shows_every_place_on_its_path_and_what_followed_there() -> None:
    parents = np.array([-1, -1, 0, 2], np.int32)
    tree = DraftTree(np.array([7, 8, 5, 6], np.int32), parents, np.zeros(4, np.float32))
    tokens = np.array([[8, 7], [5, 1], [0, 1], [9, 6], [3, 2]], np.int32)
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    whole = follow_verdict(layout, 0, [7, 5, 6, 2])
    assert whole.places.tolist() == [0, 1, 3, 4]
    assert whole.columns.tolist() == [1, 0, 1, 1]
    assert whole.accepted.tolist() == [True, True, True, False]
    # Later rounds of the same message are of other proposals.
    early = follow_verdict(layout, 0, [7, 4, 6, 2])
    assert (early.places.tolist(), early.columns.tolist()) == ([0, 1], [1, -1])
    assert early.accepted.tolist() == [True, False]


def test_proposals_together_are_judged_as_each_alone() -> None:
    cases = [random_case(seed, nodes=nodes) for seed, nodes in ((1, 5), (2, 1), (3, 20), (4, 9))]
    places = NodeIndex.of_trees([tree for tree, _, _ in cases])
    layout = CandidateLayout.of_candidates(places, np.concatenate([c[1] for c in cases]))
    logprobs = np.concatenate([c[2] for c in cases])
    prefixes = np.arange(7, 11, dtype=np.uint64)
    digests = places.prefix_digests(prefixes)
    for predictor in (OutcomeCalibration(), RankCalibration()):
        gains = predictor.expected_gains(layout, logprobs)
        for index, (tree, tokens, mine) in enumerate(cases):
            alone = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
            expected = best_outcomes(
                alone, predictor.expected_gains(alone, mine), 0, room=9, count=6
            )
            found = best_outcomes(layout, gains, index, room=9, count=6)
            first = layout.roots[index]
            assert (found.places - first).tolist() == expected.places.tolist()
            assert found.tokens.tolist() == expected.tokens.tolist()
            np.testing.assert_allclose(found.gains, expected.gains)
            emitted = tree.tokens[list(path(tree.parents, len(tree) - 1))].tolist()
            assert (
                follow_verdict(layout, index, emitted).places - first
            ).tolist() == follow_verdict(alone, 0, emitted).places.tolist()
            for node in range(-1, len(tree)):
                tokens_to = tree.tokens[list(path(tree.parents, node))].tolist()
                expected_digest = extend_digest(int(prefixes[index]), tokens_to)
                assert int(digests[first + node + 1]) == expected_digest


@pytest.mark.parametrize(
    ("gains", "count"),
    [
        ([], 0),
        ([0.001] * 40, 0),
        ([0.3, 0.001], 2),
        ([0.3] + [0.001] * 60, 4),
        ([0.1] * 5 + [0.001] * 60, 16),
        ([0.01] * 32 + [0.003] * 60, 32),
        ([0.01] * 24 + [0.0] * 60, 32),
        ([0.01] * 500, 64),
    ],
)
def test_as_many_are_drafted_for_as_fill_the_largest_launch_that_pays(
    gains: list[float], count: int
) -> None:
    found = num_worthwhile(np.array(gains))
    assert found == count
    assert found in (0, len(gains), *OUTCOME_BATCH_SIZES)
