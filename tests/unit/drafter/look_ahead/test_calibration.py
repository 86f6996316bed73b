"""Expected hit rates against simulated ones: a model that misjudges itself is seen through.

c candidates a place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_drafter.look_ahead.calibration import (
    OutcomeCalibration,
    OutcomePredictor,
    RankCalibration,
)
from outrider_drafter.state.outcomes import (
    CandidateLayout,
    NodeIndex,
    best_outcomes,
    follow_verdict,
)

from outrider.spec.tree import ROOT, DraftTree, children

C, FAN_OUT, ROUNDS = 32, 8, 1500


@dataclass(frozen=True)
class World:
    """A target whose distribution is the draft model's, sharpened, with noise that grows with the
    depth; at each place the draft model names the best C."""

    sharpness: float
    error: float

    def places(
        self, rng: np.random.Generator, depths: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """The target's distribution [m, C] over the candidates, and their log-probs, best first."""
        scores = np.sort(rng.gumbel(size=(len(depths), C)) * 2.0)[:, ::-1]
        logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        errors = rng.normal(size=scores.shape) * self.error * (1.0 + 0.3 * depths[:, None])
        target = np.exp(scores * self.sharpness + errors)
        return target / target.sum(axis=1, keepdims=True), logprobs.astype(np.float32)


def tree_of(parents: NDArray[np.int32], tokens: NDArray[np.int32]) -> DraftTree:
    """Children are the best candidates of their places, in order."""
    drafted = np.zeros(len(parents), np.int32)
    for place, nodes in enumerate(children(parents)):
        drafted[nodes] = tokens[place, : len(nodes)]
    return DraftTree(drafted, parents, np.zeros(len(parents), np.float32))


CHAIN = np.arange(-1, 4, dtype=np.int32)
TREE = np.array([-1, -1, -1, 0, 0, 1, 3, 3, 4, 6], dtype=np.int32)


def simulate(
    world: World, parents: NDArray[np.int32], predictor: OutcomePredictor, *, spread: bool = False
) -> tuple[float, float]:
    """(expected, realised) hit rate over the second half of ROUNDS; `spread`: every place gets as
    many outcomes as any other."""
    rng = np.random.default_rng(5)
    tokens = np.tile(np.arange(C, dtype=np.int32), (len(parents) + 1, 1))
    tree = tree_of(parents, tokens)
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    expected = hits = 0.0
    for number in range(ROUNDS):
        distribution, logprobs = world.places(rng, layout.depths)
        gains = predictor.expected_gains(layout, logprobs)
        if spread:
            gains = 1.0 / (1.0 + np.cumsum(~layout.is_child, axis=1))
        chosen = best_outcomes(layout, gains, 0, room=99, count=FAN_OUT)
        node, emitted = ROOT, list[int]()
        while True:
            token = int(rng.choice(C, p=distribution[node + 1]))
            emitted.append(token)
            below = np.flatnonzero((parents == node) & (tree.tokens == token))
            if not len(below):
                break
            node = int(below[0])
        if number >= ROUNDS // 2:
            expected += chosen.gains.sum()
            hits += bool(((chosen.places == node + 1) & (chosen.tokens == token)).any())
        predictor.learn_from_verdict(layout, logprobs, follow_verdict(layout, 0, emitted))
    return expected / (ROUNDS - ROUNDS // 2), hits / (ROUNDS - ROUNDS // 2)


WORLDS = [World(1.0, 0.0), World(2.0, 0.5), World(0.5, 0.8)]


@pytest.mark.parametrize("world", WORLDS, ids=["honest", "timid", "boastful"])
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_expected_hit_rate_is_the_realised_one(
    world: World, parents: NDArray[np.int32]
) -> None:
    expected, realised = simulate(world, parents, OutcomeCalibration())
    assert abs(expected - realised) < 0.05
    assert realised > simulate(world, parents, OutcomeCalibration(), spread=True)[1] + 0.02


def test_a_new_calibration_says_what_the_source_says() -> None:
    rng = np.random.default_rng(1)
    probs = np.sort(rng.dirichlet([0.2] * C, 6))[:, ::-1]
    found = OutcomeCalibration().probs(np.arange(6), np.log(probs).astype(np.float32))
    np.testing.assert_allclose(found, probs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("world", "least", "most"),
    [(WORLDS[0], 0.85, 1.2), (WORLDS[1], 1.4, 2.2), (WORLDS[2], 0.4, 0.8)],
)
@pytest.mark.parametrize("begins", [1.0, 1.3])
def test_a_source_that_is_timid_or_boastful_everywhere_is_soon_seen_through(
    world: World, least: float, most: float, begins: float
) -> None:
    """After 200 places no cell of depth, rank and probability has seen much."""
    rng, calibration = np.random.default_rng(3), OutcomeCalibration(begins)
    for _ in range(200):
        depths = np.zeros(1, dtype=np.int64)
        distribution, logprobs = world.places(rng, depths)
        calibration.observe(depths, logprobs, np.array([rng.choice(C, p=distribution[0])]))
    assert least < calibration.sharpness < most


def test_tokens_that_no_candidate_was_soften_the_law() -> None:
    calibration, depths = OutcomeCalibration(1.3), np.zeros(40, dtype=np.int64)
    logprobs = np.log(np.tile(np.array([0.8, 0.1], dtype=np.float32), (40, 1)))
    calibration.observe(depths, logprobs, np.full(40, -1))
    assert 0.5 <= calibration.sharpness < 1.0
    known, before = calibration.sharpness, calibration.probs(depths, logprobs)
    # A place that was not looked at tells nothing.
    calibration.observe(depths, np.full((40, 2), -np.inf, np.float32), np.full(40, -1))
    assert calibration.sharpness == known
    assert (calibration.probs(depths, logprobs) == before).all()
    found = calibration.probs(depths[:1], np.array([[-0.1, -np.inf]], dtype=np.float32))
    assert 0.0 < found[0, 0] < 1.0 and found[0, 1] == 0.0


def test_what_is_learnt_fades_so_that_a_change_is_followed() -> None:
    calibration, depths = OutcomeCalibration(), np.zeros(50, dtype=np.int64)
    logprobs = np.log(np.full((50, 2), 0.5, dtype=np.float32))
    for first in (True, False):
        columns = np.full(50, 0 if first else 1)
        for _ in range(1000):
            calibration.observe(depths, logprobs, columns)
        found = calibration.probs(depths[:1], logprobs[:1])[0]
        assert found[columns[0]] > 0.8


def test_the_fixed_spread_knows_no_probability() -> None:
    """Two proposals of one shape get the same outcomes by rank, whatever was drawn in them."""
    rng = np.random.default_rng(2)
    tokens = np.tile(np.arange(C, dtype=np.int32), (len(TREE) + 1, 1))
    tree = tree_of(TREE, tokens)
    layout = CandidateLayout.of_candidates(NodeIndex.of_trees([tree]), tokens)
    spread = RankCalibration()
    for emitted in ([0, 0, 9], [1, 20], [5], [0, 1, 0]):
        _, logprobs = WORLDS[0].places(rng, layout.depths)
        spread.learn_from_verdict(layout, logprobs, follow_verdict(layout, 0, emitted))
    first, second = (
        spread.expected_gains(layout, WORLDS[0].places(rng, layout.depths)[1]) for _ in range(2)
    )
    assert (first == second).all()


def test_the_fixed_spread_learns_where_paths_end_and_which_ranks_follow() -> None:
    expected, realised = simulate(WORLDS[2], CHAIN, RankCalibration())
    assert abs(expected - realised) < 0.05
    assert realised > simulate(WORLDS[2], CHAIN, RankCalibration(), spread=True)[1] + 0.01
