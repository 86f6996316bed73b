"""Every emitted token follows the target's distribution, whatever was drafted: chi-square through
`accept`.

Rows differ by seed only. The draft side is `propose_children` with the production noise. Trials are
as many as LEAST_BIAS needs; `test_joint_distributions` sees a sixth of that through the device's
twin, which judges as `accept` does, decision by decision
(tests/unit/engine/kernels/test_acceptance.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import accept_drafts
from outrider.engine.draft_sampling import DEFAULT_DISTRIBUTION_LIMITS, DistributionLimits
from outrider.spec.noise import NoiseStream
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.acceptance_oracle import softmax, warped_probs
from tests.reference.goodness_of_fit import LEAST_P, least_bias, p_value
from tests.reference.host_rounds import Drafts, Logits, accept_rows, draft, seeded

BATCH_ELEMENTS = 1 << 20
POSITION = 17
LEAST_BIAS = 0.2
"""What is seen of the likeliest first token's probability."""
GROUPS = 16
OPPOSITE = 10_000
"""Trials against a draft that is the target's opposite, where shared noise is seen at once."""

Legal = Sequence[NDArray[np.uint32]]
"""Masks [W] by depth (`outrider.engine.logits_processor.TokenHistory.legal`)."""


def _by_depth(levels_LV: Tensor) -> Logits:
    """Logits that depend on the depth only."""

    def logits(context: NDArray[np.int64]) -> Tensor:
        return levels_LV[context.shape[1]].repeat(len(context), 1)

    return logits


def _tokens_by_index(
    target_LV: Tensor,
    draft_LV: Tensor,
    base: SamplingParams,
    widths: list[int],
    trials: int,
    *,
    has_distribution: bool = True,
    limits: DistributionLimits = DEFAULT_DISTRIBUTION_LIMITS,
    allowed_tokens: Legal | None = None,
) -> list[NDArray[np.int64]]:
    """Counts [V] of the tokens emitted at each index of the rounds. `legal`: by depth, what is
    legal; the drafts are not masked."""
    levels, vocab = target_LV.shape
    counts = [np.zeros(vocab, dtype=np.int64) for _ in range(levels)]
    batch = min(8192, BATCH_ELEMENTS // vocab)
    for first in range(0, trials, batch):
        params = seeded(base, min(batch, trials - first), first)
        positions = [POSITION] * len(params)
        drafts = draft(_by_depth(draft_LV), params, positions, widths, limits=limits)
        rows = accept_rows(drafts, params, positions, stride=0)
        if not has_distribution:
            rows = [replace(row, distribution=None) for row in rows]
        if allowed_tokens is not None:
            depths = [0, *(drafts.context(node).shape[1] for node in range(len(drafts.parents)))]
            masks = np.stack([allowed_tokens[depth] for depth in depths])
            rows = [replace(row, allowed_tokens=masks) for row in rows]
        by_node = _node_logits(target_LV, drafts)
        for result in accept_drafts(by_node, rows):
            for index, token in enumerate(result.tokens):
                counts[index][token] += 1
    return counts


def _node_logits(target_LV: Tensor, drafts: Drafts) -> Tensor:
    depths = [0, *(drafts.context(node).shape[1] for node in range(len(drafts.parents)))]
    return target_LV[depths]


def _random_levels(levels: int, vocab: int, *, seed: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(levels, vocab, generator=generator) * spread
    noise = torch.randn(levels, vocab, generator=generator)
    return target, 0.9 * target + 0.6 * noise


def _check(counts: list[NDArray[np.int64]], target_LV: Tensor, base: SamplingParams) -> None:
    for index, observed in enumerate(counts):
        expected = warped_probs(target_LV[index].numpy().astype(np.float64), base)
        assert observed[expected == 0].sum() == 0
        if observed.sum() >= 1000:
            assert p_value(observed, expected) > LEAST_P, f"token {index}"
    first = warped_probs(target_LV[0].numpy().astype(np.float64), base)
    assert least_bias(first, int(counts[0].sum())) < LEAST_BIAS


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
@pytest.mark.parametrize(
    ("length", "temperature", "dtype"),
    [(1, 1.0, torch.float32), (3, 0.6, torch.bfloat16)],
)
def test_a_chain_emits_the_target_law_over_4096_ids(
    rule: Rule, length: int, temperature: float, dtype: torch.dtype
) -> None:
    """Judged id by id, and in groups of ids by how much too often the draft proposes them: a fifth
    of the draft's distribution in the target's would be seen there."""
    target, drafted = _random_levels(length + 1, 4096, seed=length, spread=1.5)
    drafted = drafted.to(dtype).to(torch.float32)
    base = SamplingParams(temperature=temperature, rule=rule)
    limits = DistributionLimits(max_ids=256)  # a cap that bites, and keeps the test fast
    counts = _tokens_by_index(target, drafted, base, [1] * length, 6_000, limits=limits)
    both = (target, drafted)
    for index, observed in enumerate(counts):
        distribution, drawn = (
            softmax(levels[index].double().numpy() / temperature) for levels in both
        )
        if observed.sum() >= 1000:
            assert p_value(observed, distribution) > LEAST_P, f"token {index}"
            groups = np.array_split((drawn / distribution).argsort(), GROUPS)
            assert _in_groups(observed, distribution, groups) > LEAST_P, f"token {index}"
        if index == 0:
            leaked = observed.sum() * (0.8 * distribution + 0.2 * drawn)
            assert _in_groups(leaked, distribution, groups) < LEAST_P


def _in_groups(
    counts: NDArray[np.generic], distribution: NDArray[np.float64], groups: list[NDArray[np.int64]]
) -> float:
    """The p-value of how often a token of each group was seen."""
    return p_value(
        [counts[ids].sum() for ids in groups], [distribution[ids].sum() for ids in groups]
    )


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_a_tree_emits_the_target_law(rule: Rule) -> None:
    """Few ids and a draft distribution that is half right: second children are often decisive."""
    target = torch.tensor([[0.2, 0.6, 0.2, 0.3], [0.5, 0.1, 0.3, 0.1], [0.4, 0.2, 0.1, 0.3]]).log()
    drafted = torch.tensor([[0.5, 0.4, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2]]).log()
    base = SamplingParams(temperature=1.0, rule=rule)
    counts = _tokens_by_index(target, drafted, base, [3, 2], 6_000)
    _check(counts, target, base)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_a_truncated_target_law_is_emitted(rule: Rule) -> None:
    target, drafted = _random_levels(3, 40, seed=6, spread=1.5)
    base = SamplingParams(
        temperature=0.9, rule=rule, top_k=14, top_p=0.95, min_p=0.05, banned_ids=(3, 7)
    )
    logits = target[1].numpy().astype(np.float64)
    kept = np.count_nonzero(warped_probs(logits, base))
    for off in (replace(base, top_k=0), replace(base, top_p=1.0)):
        assert np.count_nonzero(warped_probs(logits, off)) > kept, "every setting cuts something"
    counts = _tokens_by_index(target, drafted, base, [2, 1], 4_000)
    _check(counts, target, base)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_a_masked_target_law_is_emitted_whatever_is_drafted(rule: Rule) -> None:
    """The distribution is the target's over what a grammar allows, cut by top-p after that; drafts
    that it does not allow are among the likeliest ones."""
    target, drafted = _random_levels(3, 40, seed=9, spread=1.5)
    rng = np.random.default_rng(3)
    allowed = np.zeros((3, 64), dtype=np.uint8)
    allowed[:, :40] = rng.random((3, 40)) < 0.4
    allowed[np.arange(3), target.numpy().argmax(axis=1)] = 0
    allowed[0, int(target[0].topk(2).indices[1])] = 1
    allowed_tokens = list(np.packbits(allowed, axis=1, bitorder="little").view("<u4"))
    base = SamplingParams(temperature=0.9, rule=rule, top_p=0.95)
    counts = _tokens_by_index(target, drafted, base, [2, 1], 3_000, allowed_tokens=allowed_tokens)
    masked = target.masked_fill(torch.from_numpy(allowed[:, :40] == 0), -torch.inf)
    _check(counts, masked, base)
    assert all((observed > 0).sum() > 3 for observed in counts[:2])


def test_a_missing_law_keeps_the_target_law() -> None:
    target, drafted = _random_levels(3, 16, seed=7, spread=1.2)
    base = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
    counts = _tokens_by_index(target, drafted, base, [1, 1], 8_000, has_distribution=False)
    _check(counts, target, base)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_opposite_laws_leave_no_trace_of_the_draft(rule: Rule) -> None:
    """Draft logits are minus the target's: noise shared by two streams shows up here first."""
    target = torch.linspace(-2.0, 2.0, 16).repeat(2, 1)
    base = SamplingParams(temperature=1.0, rule=rule)
    counts = _tokens_by_index(target, -target, base, [1], OPPOSITE)
    _check(counts, target, base)


def test_opposite_laws_in_a_tree_leave_no_trace_of_the_draft() -> None:
    target = torch.linspace(-2.0, 2.0, 16).repeat(3, 1)
    base = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
    counts = _tokens_by_index(target, -target, base, [3, 1], OPPOSITE)
    _check(counts, target, base)


@pytest.mark.parametrize(
    ("rule", "shared"), [(Rule.REJECTION, "RECOVER"), (Rule.COUPLED, "TARGET")]
)
def test_noise_shared_with_the_draft_would_be_noticed(
    rule: Rule, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the test above. Coupled rows may share: they stay exact by construction."""
    streams = {name: NoiseStream[name] for name in NoiseStream.__members__} | {
        shared: NoiseStream.DRAFT
    }
    namespace = type("Streams", (), streams)
    monkeypatch.setattr("outrider.engine.acceptance.NoiseStream", namespace)
    target = torch.linspace(-2.0, 2.0, 16).repeat(2, 1)
    base = SamplingParams(temperature=1.0, rule=rule)
    counts = _tokens_by_index(target, -target, base, [1], OPPOSITE)
    biased = p_value(counts[0], softmax(target[0].numpy().astype(np.float64))) < LEAST_P
    assert biased is (rule is Rule.REJECTION)
