"""Acceptance where distributions or logits are not finite: PyTorch reference and kernels decide as
the host does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.engine.acceptance import accept_drafts
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
    accept_sampled_torch,
    accept_sampled_triton,
)
from outrider.engine.kernels.sampling import choose_tokens_torch
from outrider.spec.sampling import Rule
from tests.reference.device_rounds import (
    DEVICE,
    Launch,
    MixedBatch,
    Outcome,
    dense_law,
    device_law,
    mixed_batch,
    outcomes,
)

CPU = torch.device("cpu")
LAUNCHES = [(accept_sampled_torch, CPU), (accept_sampled_triton, DEVICE)]


def _host(batch: MixedBatch) -> list[Outcome]:
    return [
        (r.accepted_nodes, r.tokens, r.resampled, r.used_target_only_fallback)
        for r in accept_drafts(batch.logits, batch.rows)
    ]


def _judge(
    launch: Launch,
    batch: MixedBatch,
    distribution: SparseDistribution | DenseChainDistribution | None,
    device: torch.device,
) -> list[Outcome]:
    here, logits = batch.device.to(device), batch.logits.to(device)
    chosen = choose_tokens_torch(
        logits, here.state, here.slots, here.positions, rows_per_slot=here.num_nodes, side="target"
    )
    result = launch(
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
    return outcomes(result)


def _dense(batch: MixedBatch, vocab: int) -> DenseChainDistribution:
    ids = torch.arange(vocab, dtype=torch.int32)
    distributions = [row.distribution for row in batch.rows]
    return dense_law(distributions, batch.device.slots, batch.device.num_nodes - 1, ids, vocab)


@pytest.mark.parametrize(("launch", "device"), LAUNCHES)
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_dense_law_that_is_none_is_judged_target_only(
    launch: Launch, device: torch.device, value: float
) -> None:
    batch = mixed_batch(16, 40, [1, 1, 1], seed=21, rules=(Rule.REJECTION,))
    lawless = batch._replace(rows=[replace(row, distribution=None) for row in batch.rows])
    distribution = _dense(batch, 40)
    found = _judge(
        launch,
        batch,
        distribution._replace(probs=torch.full_like(distribution.probs, value)),
        device,
    )
    assert found == _host(lawless)
    assert {fallback for *_, fallback in found} == {True, False}, "greedy rows ask for no law"


@pytest.mark.parametrize(("launch", "device"), LAUNCHES)
def test_a_law_may_be_missing_at_one_node_only(launch: Launch, device: torch.device) -> None:
    batch = mixed_batch(20, 40, [1, 1, 1], seed=22, rules=(Rule.REJECTION,))
    distribution = _dense(batch, 40)
    whole = _judge(launch, batch, distribution, device)
    distribution.probs[:, 1] = torch.nan
    for before, after in zip(whole, _judge(launch, batch, distribution, device), strict=True):
        walked = len(after[0])
        sampled = before[3] != after[3]
        assert sampled <= (walked >= 1), "told where the walk came to the node, else not"
        if walked == 0:
            assert after[:3] == before[:3]


@pytest.mark.parametrize(("launch", "device"), LAUNCHES)
@pytest.mark.parametrize("widths", [[], [1, 1], [3, 2]])
def test_infinite_logits_share_their_probability(
    launch: Launch, device: torch.device, widths: list[int]
) -> None:
    """Columns 3 and 7 of every row; among the drafts there are some of them."""
    batch = mixed_batch(16, 24, widths, seed=23)
    batch.logits[:, [3, 7]] = torch.inf
    if widths:
        tokens = batch.device.tokens.view(16, -1)
        tokens[::3, 1], batch.drafts.tokens[::3, 0] = 7, 7
        rows = []
        for index, row in enumerate(batch.rows):
            odd = index % 3 == 0
            tree = batch.drafts.tree(index)
            rows.append(replace(row, tree=tree, distribution=None if odd else row.distribution))
        batch = batch._replace(rows=rows)
    distributions = device_law([row.distribution for row in batch.rows], batch.device.num_nodes)
    found = _judge(launch, batch, distributions, device)
    assert found == _host(batch)
    assert {tokens[-1] for _, tokens, *_ in found} == {3, 7}
