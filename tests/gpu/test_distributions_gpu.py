"""Laws drawn from and judged on a GPU at real vocabulary sizes, against the PyTorch references and
the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.acceptance import accept_drafts
from outrider.engine.draft_sampling import DistributionLimits, distribution_limits_for
from outrider.engine.kernels.acceptance.randomized import SparseDistribution, accept_sampled
from outrider.engine.kernels.drafts.distribution_sampling import (
    DrawnDistributions,
    draw_from_distributions,
    draw_from_distributions_torch,
)
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import SamplingState
from outrider.spec.noise import NoiseStream, gumbel
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import device_law, mixed_batch, outcomes, sampling_state

pytestmark = pytest.mark.gpu

ROWS = 12


def _params(rows: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=(0.6, 1.0, 2.0)[row % 3], rule=Rule.REJECTION, seed=row)
        for row in range(rows)
    ]


def _check_row(
    found: DrawnDistributions,
    twin: DrawnDistributions,
    row: int,
    params: SamplingParams,
    ids: torch.Tensor,
) -> None:
    """The kernel's distribution is the PyTorch reference's up to roundings, and its token is drawn
    from its own."""
    size, expected = int(found.sizes[row]), int(twin.sizes[row])
    assert abs(size - expected) <= max(3, expected // 1000)
    columns, counts = found.entries[:, row, :size]
    assert (columns.diff() > 0).all() and int(counts.min()) >= 1 and int(counts.max()) == 65535
    width = int(ids.shape[0])
    own, theirs = np.zeros(width), np.zeros(width)
    own[columns.numpy()] = counts.numpy()
    kept = twin.entries[:, row, :expected]
    theirs[kept[0].numpy()] = kept[1].numpy()
    assert (np.abs(own - theirs) <= 2).mean() > 0.999
    noise = gumbel(params.seed, NoiseStream.DRAFT, 40 + row, ids[columns.long()].numpy())
    assert int(found.columns[row]) == int(columns[(np.log(counts.numpy()) + noise).argmax()])


@pytest.mark.parametrize("columns", [1000, 32_000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "limits", [DistributionLimits(), distribution_limits_for(4), DistributionLimits(max_ids=64)]
)
def test_laws_are_cut_and_drawn_as_the_twin_does(
    columns: int, dtype: torch.dtype, limits: DistributionLimits, device: torch.device
) -> None:
    params = _params(ROWS)
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(ROWS, columns, generator=generator) * 2.5).to(dtype)
    slots = torch.randperm(ROWS, generator=generator).to(torch.int32)
    positions = torch.arange(ROWS, dtype=torch.int32) + 40
    ids = torch.arange(columns, dtype=torch.int64) + 5
    state = sampling_state(params, slots, ROWS + 1)
    twin = draw_from_distributions_torch(logits, state, slots, positions, ids=ids, limits=limits)
    found = draw_from_distributions(
        logits.to(device),
        SamplingState(*(t.to(device) for t in state)),
        slots.to(device),
        positions.to(device),
        ids=ids.to(device),
        limits=limits,
    )
    moved = DrawnDistributions(*(t.cpu() for t in found))
    for row in range(ROWS):
        _check_row(moved, twin, row, params[row], ids)


@pytest.mark.parametrize("widths", [[1, 1, 1], [4, 2, 1]])
def test_laws_in_static_memory_are_judged_as_the_host_judges_them(
    widths: list[int], device: torch.device
) -> None:
    """Behind the entries of the round lies room for more, as in a captured round."""
    batch = mixed_batch(64, 8193, widths, seed=31)
    expected = [
        (r.accepted_nodes, r.tokens, r.resampled, r.used_target_only_fallback)
        for r in accept_drafts(batch.logits, batch.rows)
    ]
    distribution = device_law([row.distribution for row in batch.rows], batch.device.num_nodes)
    room = 1 << 20
    padded = [torch.zeros(room, dtype=torch.int32) for _ in range(2)]
    for memory, entries in zip(padded, (distribution.ids, distribution.counts), strict=True):
        memory[: len(entries)] = entries
    here, logits = batch.device.to(device), batch.logits.to(device)
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
        distribution=SparseDistribution(*(t.to(device) for t in (*padded, distribution.ranges))),
    )
    found = outcomes(result)
    # A random draw within an ulp of its probability may fall on the other side.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1


@pytest.mark.parametrize("rule", [Rule.TARGET_ONLY, Rule.REJECTION])
def test_infinite_logits_share_their_probability(rule: Rule, device: torch.device) -> None:
    batch = mixed_batch(64, 300, [1, 1], seed=32, rules=(rule,))
    batch.logits[:, [3, 7]] = torch.inf
    expected = [
        (r.accepted_nodes, r.tokens, r.resampled, r.used_target_only_fallback)
        for r in accept_drafts(batch.logits, batch.rows)
    ]
    distribution = device_law([row.distribution for row in batch.rows], batch.device.num_nodes)
    here, logits = batch.device.to(device), batch.logits.to(device)
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
        distribution=SparseDistribution(*(t.to(device) for t in distribution)),
    )
    assert outcomes(result) == expected
