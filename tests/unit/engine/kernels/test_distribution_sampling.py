"""Laws cut and drawn from on the device: the host's, and exactly those that are shipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.draft_sampling import DistributionLimits, propose_children
from outrider.engine.kernels.drafts.distribution_sampling import (
    ChainDistributions,
    DrawnDistributions,
    draw_from_distributions_torch,
    draw_from_distributions_triton,
    with_target_ids,
)
from outrider.engine.kernels.session_tensors import SamplingState
from outrider.spec.noise import NoiseStream, gumbel
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import DEVICE, sampling_state
from tests.reference.goodness_of_fit import LEAST_P, p_value

V = 700
IDS = torch.arange(V, dtype=torch.int32) * 3 + 1
LIMITS = [
    DistributionLimits(),
    DistributionLimits(max_ids=20),
    DistributionLimits(mass=0.6),
    DistributionLimits(mass=1.0),
]


def _params(rows: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=(0.5, 1.0, 2.5)[row % 3], rule=Rule.REJECTION, seed=row)
        for row in range(rows)
    ]


def _logits(rows: int, *, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(rows)) * scale


def _arguments(params: list[SamplingParams]) -> tuple[SamplingState, Tensor, Tensor]:
    rows = len(params)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    positions = torch.arange(rows, dtype=torch.int32) + 40
    return sampling_state(params, slots, rows + 1), slots, positions


def _on_device(
    logits: Tensor,
    params: list[SamplingParams],
    limits: DistributionLimits,
    *,
    tile: int,
    block: int,
) -> DrawnDistributions:
    state, slots, positions = _arguments(params)
    moved = SamplingState(*(t.to(DEVICE) for t in state))
    found = draw_from_distributions_triton(
        logits.to(DEVICE),
        moved,
        slots.to(DEVICE),
        positions.to(DEVICE),
        ids=IDS.to(DEVICE),
        limits=limits,
        tile=tile,
        block=block,
    )
    return DrawnDistributions(*(t.cpu() for t in found))


@pytest.mark.parametrize("limits", LIMITS)
def test_the_twin_draws_what_the_host_draws(limits: DistributionLimits) -> None:
    params, logits = _params(30), _logits(30)
    state, slots, positions = _arguments(params)
    found = draw_from_distributions_torch(logits, state, slots, positions, ids=IDS, limits=limits)
    host = propose_children(
        logits, IDS.long(), params, positions.tolist(), 1, distribution_limits=limits
    )
    assert found.columns.tolist() == host.draft_ids[:, 0].tolist()
    for row, distribution in enumerate(host.distributions):
        assert distribution is not None
        size = int(found.sizes[row])
        assert IDS[found.entries[0, row, :size].long()].tolist() == distribution[0].tolist()
        assert found.entries[1, row, :size].tolist() == distribution[1].tolist()


@pytest.mark.parametrize("is_increasing", [True, False])
def test_shipped_entries_have_increasing_target_ids(is_increasing: bool) -> None:
    ids = torch.tensor([3, 8, 9, 20, 31]) if is_increasing else torch.tensor([9, 31, 3, 20, 8])
    # Behind the size lies anything.
    columns = torch.tensor([[[0, 2, 3, -9], [1, 2**31 - 1, 0, 0]], [[0, 1, 2, 4], [5, 6, 7, 8]]])
    counts = torch.arange(16).view(2, 2, 4) + 1
    given = ChainDistributions(
        torch.tensor([[3, 1], [4, 0]], dtype=torch.int32), torch.stack((columns, counts)).int()
    )
    found = with_target_ids(given, ids, is_increasing=is_increasing)
    assert found.entries.dtype == torch.int32 and found.entries.is_contiguous()
    for row, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        size = int(given.sizes[row, step])
        assert int(found.sizes[row, step]) == size
        expected = sorted(
            (int(ids[column]), int(count))
            for column, count in zip(
                columns[row, step, :size].tolist(), counts[row, step, :size].tolist(), strict=True
            )
        )
        entries = found.entries[:, row, step, :size].t().tolist()
        assert [tuple(entry) for entry in entries] == expected


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("tile", "block"), [(128, 64), (1024, 1024)])
def test_the_kernels_cut_and_draw_as_the_twin_does(
    limits: DistributionLimits, tile: int, block: int
) -> None:
    """Exponentials may differ by an ulp, and a count by 1; the token is that of the own counts."""
    params, logits = _params(3), _logits(3)
    state, slots, positions = _arguments(params)
    twin = draw_from_distributions_torch(logits, state, slots, positions, ids=IDS, limits=limits)
    found = _on_device(logits, params, limits, tile=tile, block=block)
    assert (found.sizes - twin.sizes).abs().max() <= 1
    for row in range(3):
        size = int(found.sizes[row])
        columns, counts = found.entries[:, row, :size]
        assert (columns.diff() > 0).all() and counts.min() >= 1 and counts.max() == 65535
        own = np.zeros(V)
        own[columns.numpy()] = counts.numpy()
        theirs = np.zeros(V)
        expected = twin.entries[:, row, : int(twin.sizes[row])]
        theirs[expected[0].numpy()] = expected[1].numpy()
        assert (np.abs(own - theirs) <= 1).sum() >= V - 1
        ids = IDS[columns.long()].numpy()
        noise = gumbel(params[row].seed, NoiseStream.DRAFT, int(positions[row]), ids)
        assert int(found.columns[row]) == int(columns[(np.log(counts.numpy()) + noise).argmax()])


def test_ties_at_the_edge_go_to_the_lower_columns() -> None:
    logits = torch.zeros(2, V)
    logits[1, ::7] = 3.0
    params = [SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=s) for s in range(2)]
    found = _on_device(logits, params, DistributionLimits(max_ids=150), tile=256, block=64)
    assert found.sizes.tolist() == [150, 150]
    assert found.entries[0, 0].tolist() == list(range(150))
    high = list(range(0, V, 7))
    rest = [column for column in range(V) if column % 7][: 150 - len(high)]
    assert found.entries[0, 1].tolist() == sorted(high + rest)


def test_odd_logits_and_other_rules() -> None:
    logits = _logits(6)
    logits[0] = torch.nan
    logits[1, [5, 9]] = torch.inf
    logits[2, :] = -torch.inf
    logits[3, 4] = torch.nan
    params = [SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=s) for s in range(6)]
    params[4] = SamplingParams(rule=Rule.REJECTION)
    params[5] = SamplingParams(temperature=1.0, rule=Rule.COUPLED)
    state, slots, positions = _arguments(params)
    twin = draw_from_distributions_torch(
        logits, state, slots, positions, ids=IDS, limits=DistributionLimits()
    )
    kernel = _on_device(logits, params, DistributionLimits(), tile=128, block=128)
    for found in (twin, kernel):
        assert found.sizes[[0, 1, 2, 4, 5]].tolist() == [1, 2, 1, 0, 0]
        assert found.columns[[0, 2, 4, 5]].tolist() == [0, 0, 0, 0]
        assert found.entries[:, 1, :2].tolist() == [[5, 9], [65535, 65535]]
        assert int(found.columns[1]) in (5, 9)
        assert 4 not in found.entries[0, 3, : int(found.sizes[3])].tolist()
    assert torch.equal(twin.columns, kernel.columns)


def test_tokens_follow_the_shipped_counts() -> None:
    trials = 20_000
    base = torch.tensor([0.0, -0.4, -1.5, -4.0, -9.0])
    state = SamplingState(
        stream_keys=torch.randint(
            -(2**63), 2**63 - 1, (trials, 4), generator=torch.Generator().manual_seed(9)
        ),
        temperatures=torch.ones(trials),
        rules=sampling_state(_params(1), torch.zeros(1, dtype=torch.int32), 1).rules.repeat(trials),
    )
    slots = torch.arange(trials, dtype=torch.int32)
    found = draw_from_distributions_torch(
        base.repeat(trials, 1),
        state,
        slots,
        torch.full((trials,), 3, dtype=torch.int32),
        ids=torch.arange(5),
        limits=DistributionLimits(mass=1.0),
    )
    counts = found.entries[1, 0, : int(found.sizes[0])].numpy()
    assert len(counts) == 5
    assert p_value(np.bincount(found.columns.numpy(), minlength=5), counts) > LEAST_P
