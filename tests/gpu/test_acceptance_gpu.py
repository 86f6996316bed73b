"""Sampling and acceptance on a GPU at real vocabulary sizes, against float64 and the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.acceptance import accept_drafts
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.acceptance.matching import (
    DeviceAcceptance,
    accept_matching,
    advance_state_torch,
    advance_state_triton,
)
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
    accept_sampled,
)
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.sampling import (
    Side,
    choose_tokens,
    choose_tokens_torch,
    choose_tokens_triton,
)
from outrider.engine.kernels.session_tensors import SequenceState
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import (
    DeviceRound,
    MixedBatch,
    Outcome,
    dense_law,
    device_law,
    device_round,
    mixed_batch,
    outcomes,
    sampling_state,
)
from tests.reference.host_rounds import accept_rows, draft

pytestmark = pytest.mark.gpu

VOCABULARIES = (100, 8193, 10_000, 128_256, 151_936)
Law = SparseDistribution | DenseChainDistribution | None


def _params(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(0.7, 1.0, 2.0, 0.0)[(index // 4) % 4],
            rule=tuple(Rule)[index % 4],
            seed=2**64 - 1 - index,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rows_per_slot", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_tokens_are_those_of_the_twin_on_the_cpu(
    vocab: int, rows_per_slot: int, dtype: torch.dtype, side: Side, device: torch.device
) -> None:
    """Padded columns hold a value that would win."""
    generator = torch.Generator().manual_seed(vocab)
    params = _params(16)
    slots = torch.randperm(16, generator=generator).to(torch.int32)
    state = sampling_state(params, slots, 17)
    rows = 16 * rows_per_slot
    logits = torch.full((rows, vocab + 64), 99.0, dtype=dtype)
    logits[:, :vocab] = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    logits[5, ::2], logits[6, :vocab] = torch.nan, torch.nan
    positions = torch.randint(0, 100_000, (rows,), generator=generator, dtype=torch.int32)
    ids = torch.randperm(vocab + 64, generator=generator).to(torch.int32)
    arguments = (logits, state, slots, positions)
    moved = (
        logits.to(device),
        type(state)(*(t.to(device) for t in state)),
        slots.to(device),
        positions.to(device),
    )
    common: dict[str, Any] = {"rows_per_slot": rows_per_slot, "num_columns": vocab}
    chosen = choose_tokens(*moved, **common, side=side, ids=ids.to(device))
    expected = choose_tokens_torch(*arguments, **common, side=side, ids=ids)
    assert torch.equal(chosen.cpu(), expected)


@pytest.mark.parametrize("tile", [256, 1024, 4096])
def test_the_tile_does_not_matter(tile: int, device: torch.device) -> None:
    params = _params(16)
    slots = torch.arange(16, dtype=torch.int32)
    state = type(sampling_state(params, slots, 17))(
        *(t.to(device) for t in sampling_state(params, slots, 17))
    )
    logits = torch.randn(16, 128_256, device=device).bfloat16()
    positions = torch.arange(16, dtype=torch.int32, device=device)
    arguments = (logits, state, slots.to(device), positions)
    chosen = choose_tokens_triton(*arguments, rows_per_slot=1, side="target", tile=tile)
    assert torch.equal(chosen, choose_tokens(*arguments, rows_per_slot=1, side="target"))


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("k", [1, 8, 16])
def test_topk_against_float64(vocab: int, k: int, device: torch.device) -> None:
    logits = (torch.randn(24, vocab, device=device) * 4).bfloat16().float()  # with ties
    temperatures = torch.linspace(0.5, 2.0, 24, device=device)
    logprobs, columns = log_softmax_topk(logits, k, temperatures=temperatures)
    scores = logits / temperatures[:, None]
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(columns.long(), order)
    expected = scores.double().log_softmax(dim=-1).gather(1, order)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)


def _wide_batch(batch: int, vocab: int, widths: list[int], *, seed: int) -> MixedBatch:
    """A mixed batch whose logits depend on the depth only: no table of V rows."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(len(widths) + 1, vocab, generator=generator) * 3
    drafted = 0.9 * target + torch.randn(target.shape, generator=generator)
    params = [replace(p, temperature=p.temperature or 0.5) for p in _params(batch)]
    positions = list(range(50, 50 + batch))
    drafts = draft(
        lambda context: drafted[context.shape[1]].repeat(len(context), 1),
        params,
        positions,
        widths,
        limits=DistributionLimits(max_ids=300),
    )
    nodes = range(len(drafts.parents))
    depth = [0, *(drafts.context(node).shape[1] for node in nodes)]
    return MixedBatch(
        logits=target[depth].repeat(batch, 1),
        rows=accept_rows(drafts, params, positions, stride=len(depth)),
        drafts=drafts,
        params=params,
        device=device_round(drafts, params, positions, seed=seed),
    )


def _sampled(
    batch: MixedBatch, distribution: Law, device: torch.device, *, pad: int = 64
) -> list[Outcome]:
    here = batch.device.to(device)
    rows, vocab = batch.logits.shape
    wide = torch.full((rows, vocab + pad), 99.0, device=device)
    wide[:, :vocab] = batch.logits.to(device)
    return outcomes(_launch(wide[:, :vocab], here, distribution, device))


def _launch(
    logits: Tensor, here: DeviceRound, distribution: Law, device: torch.device
) -> DeviceAcceptance:
    chosen = choose_tokens(
        logits, here.state, here.slots, here.positions, rows_per_slot=here.num_nodes, side="target"
    )
    return accept_sampled(
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


def _expected(batch: MixedBatch) -> list[Outcome]:
    results = accept_drafts(batch.logits, batch.rows)
    return [(r.accepted_nodes, r.tokens, r.resampled, r.used_target_only_fallback) for r in results]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("widths", [[], [1, 1, 1], [3, 2]])
def test_mixed_batches_are_judged_as_on_the_host(
    vocab: int, widths: list[int], device: torch.device
) -> None:
    batch = _wide_batch(32, vocab, widths, seed=vocab)
    distribution = device_law([row.distribution for row in batch.rows], batch.device.num_nodes)
    first = _sampled(batch, distribution, device)
    assert first == _expected(batch)
    assert all(_sampled(batch, distribution, device) == first for _ in range(20))


def test_many_small_batches_are_judged_as_on_the_host(device: torch.device) -> None:
    batch = mixed_batch(2048, 40, [4, 2, 1], seed=11)
    distribution = device_law([row.distribution for row in batch.rows], batch.device.num_nodes)
    assert _sampled(batch, distribution, device) == _expected(batch)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_dense_laws_are_judged_as_sparse_ones_on_the_host(vocab: int, device: torch.device) -> None:
    batch = _wide_batch(32, vocab, [1, 1, 1], seed=vocab + 1)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    distribution = dense_law(
        [row.distribution for row in batch.rows], batch.device.slots, 3, ids, vocab
    )
    assert _sampled(batch, distribution, device) == _expected(batch)


def test_a_captured_round_follows_its_buffers(device: torch.device) -> None:
    """Captured once, replayed over the logits, tokens and state of other rounds."""
    batches = [_wide_batch(16, 10_000, [1, 1, 1], seed=s) for s in range(3)]
    distributions = [device_law([r.distribution for r in b.rows], 4) for b in batches]
    entries = max(len(distribution.ids) for distribution in distributions)
    distributions = [_padded(distribution, entries) for distribution in distributions]
    logits = batches[0].logits.to(device)
    here = batches[0].device.to(device)
    distribution = SparseDistribution(*(t.to(device) for t in distributions[0]))

    def run() -> tuple[DeviceAcceptance, DeviceAcceptance]:
        chosen = choose_tokens(
            logits, here.state, here.slots, here.positions, rows_per_slot=4, side="target"
        )
        common: dict[str, Any] = {
            "state": here.state,
            "slots": here.slots,
            "positions": here.positions,
        }
        matched = accept_matching(chosen, here.tokens, None, num_nodes=4, **common)
        sampled = accept_sampled(
            logits, chosen, here.tokens, None, num_nodes=4, distribution=distribution, **common
        )
        return matched, sampled

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matched, sampled = run()
    for batch, other in zip(batches, distributions, strict=True):
        logits.copy_(batch.logits)
        for mine, theirs in zip(
            (*here.state, here.slots, here.positions, here.tokens, *distribution),
            (*batch.device.state, *batch.device[1:4], *other),
            strict=True,
        ):
            mine.copy_(theirs)
        graph.replay()
        expected = _expected(batch)
        assert outcomes(sampled) == expected
        matching = [p.effective_rule in (Rule.GREEDY, Rule.COUPLED) for p in batch.params]
        pairs = zip(outcomes(matched), expected, matching, strict=True)
        assert all(mine == theirs for mine, theirs, judged in pairs if judged)


def _padded(distribution: SparseDistribution, entries: int) -> SparseDistribution:
    missing = (0, entries - len(distribution.ids))
    pad = torch.nn.functional.pad
    return SparseDistribution(
        pad(distribution.ids, missing), pad(distribution.counts, missing), distribution.ranges
    )


def test_state_advances_as_in_the_twin(device: torch.device) -> None:
    batch = mixed_batch(300, 24, [1, 1, 1], seed=5, rules=(Rule.GREEDY, Rule.COUPLED)).device
    slots = batch.slots.clone()
    slots[::7] = 300
    here = batch.to(device)
    chosen = torch.from_numpy(np.random.default_rng(0).integers(0, 24, 1200).astype(np.int32))
    result = accept_matching(
        chosen.to(device), here.tokens, None, num_nodes=4,
        state=here.state, slots=here.slots, positions=here.positions,
    )  # fmt: skip
    fields = (torch.zeros(301, 4), torch.arange(301), torch.arange(301) + 500)
    twin = SequenceState(*(t.to(device, torch.int32) for t in fields))
    mine = SequenceState(*(t.clone() for t in twin))
    advance_state_torch(result, twin, slots.to(device))
    advance_state_triton(result, mine, slots.to(device))
    assert all(torch.equal(a, b) for a, b in zip(twin, mine, strict=True))
    assert int(mine.lengths[300]) == 300
