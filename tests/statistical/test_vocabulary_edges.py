"""No id outside the vocabulary: tails of odd sizes, NaN, zero residuals, bad drafts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.acceptance import AcceptanceResult, AcceptRow, accept_drafts
from outrider.engine.draft_sampling import propose_children
from outrider.spec.draft_distribution import make_distribution
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree

SIZES = [100, 8193, 10000, 151936]
ROOT_ONLY = np.array([-1], dtype=np.int32)
ZERO = np.zeros(1, dtype=np.float32)


def _params(rule: Rule, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0, rule=rule, seed=seed)


def _almost_one(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The largest random draw there is."""
    return np.full(bits.shape, 1.0 - 2.0**-53)


@pytest.mark.parametrize("vocab", SIZES)
def test_a_zero_residual_in_the_last_ids_falls_back_to_the_target_law(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p = q on the last ids and a random draw that rejects by rounding: max(p - q, 0) is 0
    everywhere."""
    monkeypatch.setattr("outrider.engine.acceptance.uniform_from_bits", _almost_one)
    last = np.arange(vocab - 3, vocab, dtype=np.int32)
    logits = torch.full((2, vocab), -math.inf)
    logits[:, vocab - 3 :] = 0.0
    tree = DraftTree(last[-1:], ROOT_ONLY, ZERO)
    distribution = make_distribution(1, {0: (last, np.full(3, 65535, dtype=np.uint16))})
    for seed in range(50):
        params = _params(Rule.REJECTION, seed)
        row = AcceptRow(
            logits_start=0, tree=tree, distribution=distribution, sampling=params, position=3
        )
        result = accept_drafts(logits, [row])[0]
        assert result.resampled
        assert result.tokens[-1] in last


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("rule", list(Rule))
def test_every_rule_stays_inside_the_vocabulary(vocab: int, rule: Rule) -> None:
    """All mass sits on the last few ids, and the drafts are drawn from there."""
    logits = torch.full((2, vocab), -20.0)
    logits[:, vocab - 5 :] = 0.0
    for seed in range(4):
        params = _params(rule, seed)
        found = propose_children(logits[:1], None, [params], [9], 1)
        token = found.tokens[0].numpy().astype(np.int32)
        assert 0 <= token[0] < vocab
        distribution = (
            make_distribution(1, {0: found.distributions[0]}) if found.distributions[0] else None
        )
        row = AcceptRow(
            logits_start=0,
            tree=DraftTree(token, ROOT_ONLY, ZERO),
            distribution=distribution,
            sampling=params,
            position=9,
        )
        assert all(0 <= t < vocab for t in accept_drafts(logits, [row])[0].tokens)


def _accept_one(logits: torch.Tensor, params: SamplingParams, token: int) -> AcceptanceResult:
    distribution = None
    if params.rule is Rule.REJECTION:
        distribution = make_distribution(
            1, {0: (np.array([2, 5], np.int32), np.array([7, 9], np.uint16))}
        )
    tree = DraftTree(np.array([token], dtype=np.int32), ROOT_ONLY, ZERO)
    row = AcceptRow(
        logits_start=0, tree=tree, distribution=distribution, sampling=params, position=4
    )
    return accept_drafts(logits, [row])[0]


@pytest.mark.parametrize("vocab", [100, 8193])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_of_nan_or_infinity_stay_in_range(vocab: int, rule: Rule, bad: float) -> None:
    for pattern in ("all", "one", "most"):
        logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
        spoiled = {"all": slice(None), "one": slice(6, 7), "most": slice(1, None)}[pattern]
        logits[:, spoiled] = bad
        result = _accept_one(logits, _params(rule), token=5)
        assert all(0 <= t < vocab for t in result.tokens)
        if not bad > 0 and pattern == "one":
            assert 6 not in result.tokens
        if not bad > 0 and pattern == "most":
            assert result.tokens == (0,)
        candidates = propose_children(logits[:1], None, [_params(rule)], [4], 3)
        kept = candidates.logprobs > -math.inf
        assert bool(kept[0, 0])
        assert not bool(candidates.logprobs.isnan().any())
        assert bool((candidates.tokens[kept] < vocab).all() & (candidates.tokens[kept] >= 0).all())
        assert bool((candidates.tokens[~kept] == -1).all())


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("token", [-1, 100, 2**31 - 1])
def test_a_placeholder_or_a_foreign_id_is_rejected_and_recovery_is_plain(
    rule: Rule, token: int
) -> None:
    """The recovered token is the one that would follow without any draft."""
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(3))
    for seed in range(50):
        params = _params(rule, seed)
        result = _accept_one(logits, params, token)
        plain = accept_drafts(logits, [AcceptRow(logits_start=0, sampling=params, position=4)])[0]
        assert result.accepted_nodes == ()
        assert result.tokens == plain.tokens
        assert result.resampled and not plain.resampled


def test_an_empty_batch_gives_an_empty_answer() -> None:
    assert accept_drafts(torch.zeros(0, 10), []) == []
