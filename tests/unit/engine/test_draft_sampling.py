from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.draft_sampling import (
    DistributionLimits,
    coupled_logprobs,
    distribution_limits_for,
    propose_children,
    quantise_distribution,
)
from outrider.engine.logits_processor import TokenHistory
from outrider.spec.noise import NoiseStream, gumbel
from outrider.spec.sampling import Rule, SamplingParams

GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.9, rule=Rule.COUPLED, seed=11)
REJECTION = SamplingParams(temperature=0.9, rule=Rule.REJECTION, seed=11)
TARGET_ONLY = SamplingParams(temperature=0.9, rule=Rule.TARGET_ONLY, seed=11)
EVERY = [GREEDY, COUPLED, REJECTION, TARGET_ONLY]


def _logits(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0


def test_a_greedy_chain_is_an_argmax_that_claims_no_log_prob(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("softmax on the greedy path")

    for name in ("softmax", "log_softmax"):
        monkeypatch.setattr(Tensor, name, forbidden)
    logits = _logits(3, 50)
    found = propose_children(logits, None, [GREEDY] * 3, [1, 2, 3], 1)
    assert found.tokens[:, 0].tolist() == logits.argmax(-1).tolist()
    assert found.logprobs.tolist() == [[0.0]] * 3
    assert found.distributions == (None, None, None)


def test_ties_go_to_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 2.0, 2.0]])
    assert propose_children(logits, None, [GREEDY], [0], 1).tokens.tolist() == [[1]]
    assert propose_children(logits, None, [GREEDY], [0], 4).tokens.tolist() == [[1, 3, 2, 4]]


@pytest.mark.parametrize("params", [GREEDY, TARGET_ONLY])
def test_most_probable_children_come_with_their_log_probs(params: SamplingParams) -> None:
    logits = _logits(2, 60)
    found = propose_children(logits, None, [params] * 2, [0, 0], 5)
    expected = (logits / (params.temperature or 1.0)).log_softmax(-1).sort(descending=True)
    assert torch.equal(found.tokens, expected.indices[:, :5])
    torch.testing.assert_close(found.logprobs, expected.values[:, :5])


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("columns", [40, 3000])
def test_coupled_children_use_the_targets_noise_under_target_ids(top_k: int, columns: int) -> None:
    logits, target_ids = _logits(1, columns), torch.arange(columns) * 2 + 5
    found = propose_children(logits, target_ids, [COUPLED], [77], top_k)
    noise = gumbel(COUPLED.seed, NoiseStream.TARGET, 77, target_ids.numpy())
    scores = (logits[0] / COUPLED.temperature).numpy() + noise
    best = np.argsort(-scores)[:top_k]
    assert found.draft_ids[0].tolist() == best.tolist()
    assert found.tokens[0].tolist() == target_ids[torch.from_numpy(best)].tolist()


def test_coupled_scores_are_log_probs_that_fall_with_the_rank() -> None:
    found = propose_children(_logits(20, 3000), None, [COUPLED] * 20, list(range(20)), 6)
    assert bool((found.logprobs <= 0.0).all())
    assert bool((found.logprobs[:, :-1] >= found.logprobs[:, 1:]).all())
    assert bool((found.logprobs.exp().sum(-1) <= 1.0 + 1e-6).all())


def test_coupled_scores_predict_how_often_the_target_agrees() -> None:
    """Mean log-score of the child that stood beats ranking blind, for a plausible draft model."""
    rows, columns = 4000, 60
    target = _logits(rows, columns, seed=1)
    drafted = target + 0.7 * _logits(rows, columns, seed=2) / 2.0
    params = [SamplingParams(temperature=1.0, seed=i) for i in range(rows)]
    found = propose_children(drafted, None, params, [3] * rows, 8)
    truth = propose_children(target, None, params, [3] * rows, 1).tokens
    first = found.logprobs[:, 0].exp()
    hit = (found.tokens[:, :1] == truth)[:, 0].float()
    sure = first > first.median()
    assert hit[sure].mean() > hit[~sure].mean() + 0.1
    assert abs(float(first.mean() - hit.mean())) < 0.1, "calibrated on average"


def test_the_law_is_what_children_are_drawn_from() -> None:
    """Frequencies of the first child over many seeds match counts / sum of counts."""
    rows = 20_000
    logits = _logits(1, 12).repeat(rows, 1)
    params = [SamplingParams(temperature=0.9, rule=Rule.REJECTION, seed=i) for i in range(rows)]
    found = propose_children(
        logits, None, params, [5] * rows, 1, distribution_limits=DistributionLimits(mass=0.9)
    )
    distribution = found.distributions[0]
    assert distribution is not None and len(distribution[0]) < 12
    ids, counts = distribution
    assert ids.dtype == np.int32 and counts.dtype == np.uint16
    seen = np.bincount(found.tokens[:, 0].numpy(), minlength=12)
    assert seen.sum() == seen[ids].sum()
    expected = counts / counts.sum() * rows
    assert ((seen[ids] - expected) ** 2 / expected).sum() < len(ids) + 6 * np.sqrt(2 * len(ids))


def test_children_of_a_law_are_distinct_and_in_the_order_drawn() -> None:
    logits, target_ids = _logits(1, 500), torch.arange(500) * 3
    found = propose_children(logits, target_ids, [REJECTION], [5], 6)
    distribution = found.distributions[0]
    assert distribution is not None
    ids, counts = distribution
    assert (np.diff(ids) > 0).all() and (counts >= 1).all() and counts.max() == 65535
    noise = gumbel(REJECTION.seed, NoiseStream.DRAFT, 5, ids)
    order = np.argsort(-(np.log(counts.astype(np.float64)) + noise))[:6]
    assert found.tokens[0].tolist() == ids[order].tolist()
    assert found.draft_ids[0].tolist() == (ids[order] // 3).tolist()
    expected = np.log(counts[order] / counts.sum())
    np.testing.assert_allclose(found.logprobs[0].numpy(), expected, rtol=1e-6)


def test_a_law_is_the_smallest_set_with_the_wanted_mass_within_the_cap() -> None:
    probs = np.array([0.04, 0.3, 0.1, 0.06, 0.5, 0.0], dtype=np.float32)
    columns, counts = quantise_distribution(probs, DistributionLimits(mass=0.85), at_least=1)
    assert columns.tolist() == [1, 2, 4]
    assert counts.tolist() == [39321, 13107, 65535]
    sizes = [
        (DistributionLimits(max_ids=2), 1, 2),
        (DistributionLimits(mass=0.1), 4, 4),
        (DistributionLimits(mass=1.0), 6, 5),
    ]
    for limits, at_least, size in sizes:
        assert len(quantise_distribution(probs, limits, at_least=at_least)[0]) == size
    flat = np.full(3000, 1.0 / 3000, dtype=np.float32)
    columns, counts = quantise_distribution(flat, DistributionLimits(max_ids=1000), at_least=1)
    assert columns.tolist() == list(range(1000)) and (counts == 65535).all()


def test_every_row_has_its_own_law_limits() -> None:
    limits = [
        distribution_limits_for(4),
        distribution_limits_for(200),
        DistributionLimits(mass=1.0, max_ids=5),
    ]
    assert [limit.max_ids for limit in limits] == [8192, 163, 5]
    found = propose_children(
        torch.zeros(3, 300), None, [REJECTION] * 3, [0] * 3, 1, distribution_limits=limits
    )
    assert [len(law[0]) for law in found.distributions if law is not None] == [299, 163, 5]


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_wide_law_is_cut_where_its_mass_is_reached(mass: float, spread: float) -> None:
    probs = (_logits(1, 5000) * spread).softmax(-1)[0].numpy()
    columns, _ = quantise_distribution(
        probs, DistributionLimits(mass=mass, max_ids=5000), at_least=1
    )
    # All is a matter of counts: each is a probability to within half a step.
    step = float(probs.max()) / 65535
    held, slack = probs[columns].astype(np.float64), len(probs) * step / 2
    assert mass - slack <= held.sum()
    assert mass == 1.0 or held.sum() - held.min() < mass + slack
    left = np.delete(probs, columns).max(initial=0.0)
    assert held.min() >= left - step


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("params", EVERY)
def test_banned_ids_are_never_proposed(params: SamplingParams, top_k: int) -> None:
    logits, target_ids = _logits(1, 30), torch.arange(30) + 100
    best = target_ids[logits[0].argsort(descending=True)].tolist()
    banned = SamplingParams(
        temperature=params.temperature, rule=params.rule, seed=3, banned_ids=tuple(best[:5])
    )
    history = TokenHistory(banned_now=(best[5],))
    for position in range(20):
        found = propose_children(logits, target_ids, [banned], [position], top_k, [history])
        assert not set(found.tokens[0].tolist()) & set(best[:6])


@pytest.mark.parametrize("params", [COUPLED, REJECTION, TARGET_ONLY])
def test_places_without_a_possible_child_are_marked(params: SamplingParams) -> None:
    only_two = SamplingParams(
        temperature=1.0, rule=params.rule, banned_ids=tuple(range(2, 40)), seed=1
    )
    found = propose_children(_logits(1, 40), None, [only_two], [0], 4)
    assert set(found.tokens[0, :2].tolist()) == {0, 1}
    assert found.tokens[0, 2:].tolist() == [-1, -1]
    assert found.draft_ids[0, 2:].tolist() == [-1, -1]
    assert found.logprobs[0, 2:].tolist() == [-math.inf] * 2
    assert bool(found.logprobs[0, :2].isfinite().all())


def test_a_vocabulary_smaller_than_top_k_is_no_problem() -> None:
    for params in EVERY:
        found = propose_children(_logits(1, 3), None, [params], [0], 5)
        assert sorted(found.tokens[0, :3].tolist()) == [0, 1, 2]
        assert found.tokens[0, 3:].tolist() == [-1, -1]


def test_scores_trust_the_draft_less_at_low_temperature() -> None:
    """There the noise decides less and the draft logits' error, divided by T, decides more."""
    perturbed = torch.tensor([[3.0, 2.0, 0.0]] * 2, dtype=torch.float64)
    cold, hot = coupled_logprobs(perturbed, torch.tensor([0.3, 2.0]))
    assert hot[0] > cold[0] and hot[2] < cold[2]
