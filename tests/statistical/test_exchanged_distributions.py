"""Chains and their distributions that pass through an exchange buffer, and are judged: the target's
distribution, whatever of the distributions is missing.

V ids, K draft length, E entries of a distribution; every session has a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import allocate_on_host, attach_buffer, new_buffer
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.acceptance.randomized import accept_sampled
from outrider.engine.kernels.drafts.distribution_sampling import (
    draw_from_distributions,
    stack_distributions,
    with_target_ids,
)
from outrider.engine.kernels.exchange.buffers import DRAFT_FIELDS, new_state
from outrider.engine.kernels.exchange.distributions import (
    new_taken_distributions,
    take_distributions,
)
from outrider.engine.kernels.exchange.drafts import new_taken_tokens, put_drafts, take_drafts
from outrider.engine.kernels.exchange.drafts_ahead import new_chosen_drafts
from outrider.engine.kernels.exchange.verdicts import new_taken_rows
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import NUM_STREAMS, RULE_REJECTION, SamplingState
from tests.reference.goodness_of_fit import LEAST_P, p_value

TRIALS, V, K, BATCH = 4_000, 6, 2, 100
CPU = torch.device("cpu")
TARGET = torch.randn(V, V, generator=torch.Generator().manual_seed(15))
DRAFT = 0.6 * TARGET + torch.randn(V, V, generator=torch.Generator().manual_seed(16))
"""Logits by the newest id; the root is id 0."""
DRAFT_IDS = torch.tensor([4, 0, 2, 5, 1, 3])
"""The draft vocabulary is the target's in another order."""
SLOTS = torch.arange(BATCH, dtype=torch.int32)


class Pair:
    """The buffer and the private memory of a verifier, for distributions of `entries` entries."""

    def __init__(self, entries: int) -> None:
        shape = ExchangeShape(
            num_slots=BATCH + 1,
            max_rows=BATCH,
            draft_length=K,
            max_chunks=0,
            chunk_tokens=1,
            feature_size=1,
            feature_dtype=torch.float32,
            distribution_entries=entries,
        )
        layout = shape.draft_layout()
        self.buffer = new_buffer(layout, CPU)
        self.memory = allocate_on_host(layout.num_bytes, CPU)
        attach_buffer(self.buffer, layout, self.memory)
        self.state = new_state(CPU)
        self.state.words.copy_(torch.tensor([0, 1, 0, 1]))
        self.entries = entries
        self.rows = new_taken_rows(BATCH, K + 1, 1, torch.float32, CPU)
        self.rows.source_slots.copy_(SLOTS)
        self.rows.counts.fill_(1)
        self.tokens = new_taken_tokens(BATCH + 1, K, CPU)
        self.chosen = new_chosen_drafts(BATCH + 1, K, CPU)
        self.taken = new_taken_distributions(BATCH + 1, K, entries, CPU)

    def array(self, name: str) -> Tensor:
        """An array of the buffer."""
        return self.buffer.bank(0)[DRAFT_FIELDS.index(name)]


@pytest.fixture(params=[V, 3], ids=["whole", "cut"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(request.param)
    yield found
    found.memory.close()


def _texts(first: int, pair: Pair, disturb: Callable[[Pair], None]) -> NDArray[np.int32]:
    """[BATCH, K + 1] tokens of a round, -1 where it emitted fewer."""
    generator = torch.Generator().manual_seed(first)
    keys = torch.randint(-(2**63), 2**63 - 1, (BATCH + 1, NUM_STREAMS), generator=generator)
    rules = torch.full((BATCH + 1,), RULE_REJECTION, dtype=torch.int32)
    state = SamplingState(keys, torch.ones(BATCH + 1), rules)
    limits = DistributionLimits(mass=1.0, max_ids=pair.entries)
    newest, tokens, drawn = torch.zeros(BATCH, dtype=torch.int64), [], []
    for step in range(K):
        where = torch.full((BATCH,), 9 + step, dtype=torch.int32)
        logits = DRAFT[newest][:, DRAFT_IDS]
        drawn.append(
            draw_from_distributions(logits, state, SLOTS, where, ids=DRAFT_IDS, limits=limits)
        )
        newest = DRAFT_IDS[drawn[-1].columns.long()]
        tokens.append(newest.int())
    distributions = with_target_ids(stack_distributions(drawn), DRAFT_IDS, is_increasing=False)
    put_drafts(
        pair.buffer,
        pair.state,
        pair.rows,
        torch.stack(tokens, dim=1),
        distributions,
        length=K,
        entries=pair.entries,
    )
    disturb(pair)
    return _judged(pair, state)


def _judged(pair: Pair, state: SamplingState) -> NDArray[np.int32]:
    """What a verifier makes of the buffer."""
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    ranges = torch.zeros((BATCH, K + 1, 2), dtype=torch.int32)
    digests = torch.zeros(BATCH + 1, dtype=torch.int64)
    take_drafts(
        pair.buffer,
        pair.state,
        SLOTS,
        digests,
        pair.tokens,
        lengths,
        chosen=pair.chosen,
        vocab_size=V,
    )
    take_distributions(
        pair.buffer,
        pair.state,
        SLOTS,
        pair.tokens,
        lengths,
        pair.taken,
        ranges,
        chosen=pair.chosen,
        vocab_size=V,
    )
    nodes = torch.cat((torch.zeros(BATCH, 1, dtype=torch.int32), pair.tokens[:BATCH]), dim=1)
    logits = TARGET[nodes.clamp(min=0).long()].view(-1, V)
    positions = (9 + torch.arange(K + 1, dtype=torch.int32)).repeat(BATCH)
    chosen = choose_tokens(logits, state, SLOTS, positions, rows_per_slot=K + 1, side="target")
    result = accept_sampled(
        logits,
        chosen,
        nodes.flatten(),
        None,
        num_nodes=K + 1,
        state=state,
        slots=SLOTS,
        positions=positions,
        distribution=pair.taken.with_ranges(ranges),
    )
    return np.column_stack([result.tokens.numpy(), result.flags.numpy() & 2])


def _untouched(pair: Pair) -> None:
    """All that was put comes."""


def _some_are_bad(pair: Pair) -> None:
    """Of every third session the first or the last distribution is none."""
    pair.array("entry_counts")[::3, 0, 0] = 70_000
    pair.array("sizes")[1::6, K - 1] = 0


def _first_tokens(pair: Pair, disturb: Callable[[Pair], None]) -> NDArray[np.int32]:
    return np.concatenate([_texts(b, pair, disturb) for b in range(TRIALS // BATCH)])


@pytest.mark.parametrize("disturb", [_untouched, _some_are_bad])
def test_exchanged_distributions_leave_no_trace_of_the_draft(
    pair: Pair, disturb: Callable[[Pair], None]
) -> None:
    texts = _first_tokens(pair, disturb)
    fallbacks = texts[:, -1].astype(bool).mean()
    assert fallbacks == 0.0 if disturb is _untouched else 0.45 < fallbacks < 0.55
    distribution = TARGET.double().softmax(dim=-1).numpy()
    assert p_value(np.bincount(texts[:, 0], minlength=V), distribution[0]) > LEAST_P
    for before in range(V):
        after = texts[(texts[:, 0] == before) & (texts[:, 1] >= 0), 1]
        if len(after) >= 500:
            assert p_value(np.bincount(after, minlength=V), distribution[before]) > LEAST_P


def test_a_distribution_that_tokens_were_not_drawn_from_would_be_noticed(pair: Pair) -> None:
    def lie(pair: Pair) -> None:
        counts = pair.array("entry_counts")
        counts.copy_(torch.where(counts > 0, counts.sqrt().int() + 1, 0))

    texts = _first_tokens(pair, lie)
    distribution = TARGET[0].double().softmax(dim=-1).numpy()
    assert p_value(np.bincount(texts[:, 0], minlength=V), distribution) < LEAST_P
