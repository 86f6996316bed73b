"""Chains drawn from quantised distributions on the device, shipped, and judged there: the target's
distribution.

T trials, V ids, K draft length; the distributions go through the types that cross the wire.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from outrider_drafter.gpu.draft_results import make_chains_with_distributions

from outrider.engine.device.inputs.distribution_inputs import DistributionInputs
from outrider.engine.device.transfer.buffers import Downloader
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.acceptance.randomized import accept_sampled
from outrider.engine.kernels.drafts.distribution_sampling import (
    draw_from_distributions,
    stack_distributions,
)
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import NUM_STREAMS, RULE_REJECTION, SamplingState
from outrider.spec.draft_distribution import validate_distribution
from tests.reference.goodness_of_fit import LEAST_P, least_bias, p_value

TRIALS, V, K, BATCH = 4_000, 6, 2, 64
CPU = torch.device("cpu")
TARGET = torch.randn(V, V, generator=torch.Generator().manual_seed(15))
DRAFT = 0.6 * TARGET + torch.randn(V, V, generator=torch.Generator().manual_seed(16))
"""Logits by the newest id; the root is id 0."""
DRAFT_IDS = torch.tensor([4, 0, 2, 5, 1, 3])
"""The draft vocabulary is the target's in another order."""


def _texts(first: int, limits: DistributionLimits, inputs: DistributionInputs) -> NDArray[np.int32]:
    """[BATCH, K + 1] tokens of a round, -1 where it emitted fewer."""
    generator = torch.Generator().manual_seed(first)
    keys = torch.randint(-(2**63), 2**63 - 1, (BATCH + 1, NUM_STREAMS), generator=generator)
    rules = torch.full((BATCH + 1,), RULE_REJECTION, dtype=torch.int32)
    state = SamplingState(keys, torch.ones(BATCH + 1), rules)
    slots, drawn = torch.arange(BATCH, dtype=torch.int32), []
    newest, tokens = torch.zeros(BATCH, dtype=torch.int64), []
    for step in range(K):
        where = torch.full((BATCH,), 9 + step, dtype=torch.int32)
        logits = DRAFT[newest][:, DRAFT_IDS]
        drawn.append(
            draw_from_distributions(logits, state, slots, where, ids=DRAFT_IDS, limits=limits)
        )
        newest = DRAFT_IDS[drawn[-1].columns.long()]
        tokens.append(newest.to(torch.int32))
    distributions = stack_distributions(drawn)
    words = torch.cat((torch.stack(tokens, dim=1), distributions.sizes), dim=1).numpy()
    ids = DRAFT_IDS.numpy().astype(np.int32)
    drafts = make_chains_with_distributions(
        words, distributions.entries, [K] * BATCH, ids, Downloader(CPU)
    )
    for draft in drafts:
        assert draft.distribution is not None
        validate_distribution(draft.distribution, draft.tree, V)
    inputs.fill_distributions([draft.distribution for draft in drafts], BATCH, K + 1)
    nodes = torch.cat((torch.zeros(BATCH, 1, dtype=torch.int32), torch.stack(tokens, 1)), dim=1)
    logits = TARGET[nodes.long()].view(-1, V)
    positions = (9 + torch.arange(K + 1, dtype=torch.int32)).repeat(BATCH)
    chosen = choose_tokens(logits, state, slots, positions, rows_per_slot=K + 1, side="target")
    result = accept_sampled(
        logits,
        chosen,
        nodes.flatten(),
        None,
        num_nodes=K + 1,
        state=state,
        slots=slots,
        positions=positions,
        distribution=inputs.distribution_of(BATCH, K + 1),
    )
    assert not (result.flags & 2).any()
    return np.asarray(result.tokens.numpy())


@pytest.mark.parametrize("limits", [DistributionLimits(mass=1.0), DistributionLimits(max_ids=3)])
def test_shipped_laws_leave_no_trace_of_the_draft(limits: DistributionLimits) -> None:
    inputs = DistributionInputs(max_rows=1, device=CPU)
    texts = np.concatenate([_texts(b, limits, inputs) for b in range(TRIALS // BATCH)])
    distribution = TARGET.double().softmax(dim=-1).numpy()
    assert p_value(np.bincount(texts[:, 0], minlength=V), distribution[0]) > LEAST_P
    assert least_bias(distribution[0], len(texts)) < 0.15
    for before in range(V):
        after = texts[(texts[:, 0] == before) & (texts[:, 1] >= 0), 1]
        if len(after) >= 500:
            assert p_value(np.bincount(after, minlength=V), distribution[before]) > LEAST_P
