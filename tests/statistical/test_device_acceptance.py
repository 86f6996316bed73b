"""Tokens that the device's acceptance emits follow the target's distribution, on the CPU and on
CUDA.

Sessions differ by seed only; drafts are made with the production noise, by `propose_children`
(sparse distributions) or `choose_tokens` (dense distributions).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
    accept_sampled,
)
from outrider.engine.kernels.sampling import choose_tokens
from outrider.spec.noise import NoiseStream
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.acceptance_oracle import softmax
from tests.reference.device_rounds import DeviceRound, device_law, device_round
from tests.reference.goodness_of_fit import LEAST_P, least_bias, p_value
from tests.reference.host_rounds import Drafts, draft, seeded, tree_shape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POSITION = 17
BATCH_ELEMENTS = 1 << 24
LEAST_BIAS = 0.25
"""What is seen of the likeliest first token's probability; `test_joint_distributions` sees an
eighth."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def _levels(levels: int, vocab: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(levels, vocab, generator=generator) * 1.5
    return target, 0.9 * target + 0.6 * torch.randn(levels, vocab, generator=generator)


def _count(
    counts: list[NDArray[np.int64]],
    target_LV: Tensor,
    arguments: DeviceRound,
    depth: list[int],
    distribution: SparseDistribution | DenseChainDistribution | None,
    device: torch.device,
) -> None:
    """Judge one batch and add its tokens to counts, by index in the round."""
    here = arguments.to(device)
    logits = target_LV[depth].to(device).repeat(len(here.slots), 1)
    chosen = choose_tokens(
        logits, here.state, here.slots, here.positions, rows_per_slot=here.num_nodes, side="target"
    )
    result = accept_sampled(
        logits,
        chosen,
        here.tokens,
        here.parents,
        num_nodes=here.num_nodes,
        state=here.state,
        slots=here.slots,
        positions=here.positions,
        distribution=None
        if distribution is None
        else type(distribution)(*(t.to(device) for t in distribution)),
    )
    tokens = result.tokens.cpu().numpy()
    for index, observed in enumerate(counts):
        emitted = tokens[:, index]
        observed += np.bincount(emitted[emitted >= 0], minlength=len(observed))


def _batches(base: SamplingParams, trials: int, elements: int) -> list[list[SamplingParams]]:
    size = max(1, min(8192, BATCH_ELEMENTS // elements))
    return [seeded(base, min(size, trials - first), first) for first in range(0, trials, size)]


def _check(counts: list[NDArray[np.int64]], target_LV: Tensor, base: SamplingParams) -> None:
    distributions = [softmax(row.double().numpy() / base.temperature) for row in target_LV]
    for index, (observed, expected) in enumerate(zip(counts, distributions, strict=True)):
        if observed.sum() >= 1000:
            assert p_value(observed, expected) > LEAST_P, f"token {index}"
    assert least_bias(distributions[0], int(counts[0].sum())) < LEAST_BIAS


def _with_sparse_laws(
    target_LV: Tensor,
    draft_LV: Tensor,
    base: SamplingParams,
    widths: list[int],
    trials: int,
    device: torch.device,
    *,
    has_distribution: bool = True,
) -> list[NDArray[np.int64]]:
    levels, vocab = target_LV.shape
    counts = [np.zeros(vocab, dtype=np.int64) for _ in range(levels)]
    parents = tree_shape(widths)
    for params in _batches(base, trials, vocab * (1 + len(parents))):
        positions = [POSITION] * len(params)
        drafts = draft(
            lambda context: draft_LV[context.shape[1]].repeat(len(context), 1),
            params,
            positions,
            widths,
            limits=DistributionLimits(max_ids=64),
        )
        distribution = None
        if has_distribution:
            distributions = [drafts.law(row) for row in range(len(params))]
            distribution = device_law(distributions, 1 + len(parents))
        depth = [0, *(drafts.context(node).shape[1] for node in range(len(parents)))]
        _count(
            counts, target_LV, device_round(drafts, params, positions), depth, distribution, device
        )
    return counts


def _with_dense_laws(
    target_LV: Tensor, draft_LD: Tensor, ids: Tensor, base: SamplingParams, trials: int,
    device: torch.device,
) -> list[NDArray[np.int64]]:  # fmt: skip
    """Chains drafted on the device over the draft vocabulary `ids`."""
    levels, vocab = target_LV.shape
    length = levels - 1
    counts = [np.zeros(vocab, dtype=np.int64) for _ in range(levels)]
    columns = torch.full((vocab,), -1, dtype=torch.int32)
    columns[ids.long()] = torch.arange(len(ids), dtype=torch.int32)
    probs = (draft_LD[:length] / base.temperature).softmax(dim=-1)
    for params in _batches(base, trials, vocab * levels):
        batch, positions = len(params), [POSITION] * len(params)
        empty = Drafts(tree_shape([1] * length), np.zeros((batch, length), np.int32), [{}] * batch)
        arguments = device_round(empty, params, positions).to(device)
        tokens = arguments.tokens.view(batch, levels)
        for step in range(length):
            drawn = choose_tokens(
                draft_LD[step].to(device).repeat(batch, 1),
                arguments.state,
                arguments.slots,
                arguments.positions.view(batch, levels)[:, step].contiguous(),
                rows_per_slot=1,
                side="draft",
                ids=ids.to(device),
            )
            tokens[:, step + 1] = ids.to(device)[drawn.long()]
        distribution = DenseChainDistribution(probs.repeat(batch + 1, 1, 1), columns, ids)
        _count(counts, target_LV, arguments, list(range(levels)), distribution, device)
    return counts


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_a_chain_emits_the_target_law(rule: Rule, device: torch.device) -> None:
    target, drafted = _levels(3, 128, seed=1)
    base = SamplingParams(temperature=0.8, rule=rule)
    _check(_with_sparse_laws(target, drafted, base, [1, 1], 8_000, device), target, base)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_a_tree_emits_the_target_law(rule: Rule, device: torch.device) -> None:
    """Few ids and a draft distribution that is half right: second children are often decisive."""
    target = torch.tensor([[0.2, 0.6, 0.2, 0.3], [0.5, 0.1, 0.3, 0.1], [0.4, 0.2, 0.1, 0.3]]).log()
    drafted = torch.tensor([[0.5, 0.4, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2]]).log()
    base = SamplingParams(temperature=1.0, rule=rule)
    _check(_with_sparse_laws(target, drafted, base, [3, 2], 5_000, device), target, base)


def test_a_missing_law_keeps_the_target_law(device: torch.device) -> None:
    target, drafted = _levels(3, 16, seed=2)
    base = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
    counts = _with_sparse_laws(target, drafted, base, [1, 1], 8_000, device, has_distribution=False)
    _check(counts, target, base)


def test_a_dense_law_keeps_the_target_law(device: torch.device) -> None:
    """The draft vocabulary is half of the target's, in another order."""
    target, drafted = _levels(3, 128, seed=3)
    ids = torch.randperm(128, generator=torch.Generator().manual_seed(4))[:64].to(torch.int32)
    base = SamplingParams(temperature=0.7, rule=Rule.REJECTION)
    counts = _with_dense_laws(target, drafted[:, ids.long()], ids, base, 10_000, device)
    _check(counts, target, base)


OPPOSITE, TRIALS = torch.linspace(-2.0, 2.0, 16).repeat(2, 1), 10_000


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_opposite_laws_leave_no_trace_of_the_draft(rule: Rule, device: torch.device) -> None:
    """Draft logits are minus the target's: noise shared by two streams shows up here first."""
    base, ids = SamplingParams(temperature=1.0, rule=rule), torch.arange(16, dtype=torch.int32)
    counts = _with_dense_laws(OPPOSITE, -OPPOSITE, ids, base, TRIALS, device)
    _check(counts, OPPOSITE, base)


def test_noise_shared_with_the_draft_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test above, on the twin: recovery that reuses the draft's noise."""
    streams = {name: NoiseStream[name] for name in NoiseStream.__members__} | {
        "RECOVER": NoiseStream.DRAFT
    }
    monkeypatch.setattr(
        "outrider.engine.kernels.acceptance.randomized.NoiseStream", type("Streams", (), streams)
    )
    base = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
    ids, cpu = torch.arange(16, dtype=torch.int32), torch.device("cpu")
    counts = _with_dense_laws(OPPOSITE, -OPPOSITE, ids, base, TRIALS, cpu)
    expected = softmax(OPPOSITE[0].double().numpy())
    assert p_value(counts[0], expected) < LEAST_P
