"""The tensors that the device's acceptance reads, from the rows that the host's reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import AcceptRow
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.acceptance.matching import (
    INVALID_OUTPUT,
    RESAMPLED,
    TARGET_ONLY_FALLBACK,
    DeviceAcceptance,
)
from outrider.engine.kernels.acceptance.randomized import DenseChainDistribution, SparseDistribution
from outrider.engine.kernels.session_tensors import (
    NUM_STREAMS,
    RULE_COUPLED,
    RULE_GREEDY,
    RULE_REJECTION,
    RULE_TARGET_ONLY,
    SamplingState,
    stream_key_row,
)
from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import depths
from tests.reference.host_rounds import Drafts, Logits, accept_rows, draft, verify_logits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run: in Triton's interpreter if there is no CUDA device."""

RULE_NUMBERS = {
    Rule.GREEDY: RULE_GREEDY,
    Rule.COUPLED: RULE_COUPLED,
    Rule.TARGET_ONLY: RULE_TARGET_ONLY,
    Rule.REJECTION: RULE_REJECTION,
}
Outcome = tuple[tuple[int, ...], tuple[int, ...], bool, bool]
"""Accepted nodes, emitted tokens, resampled, judged target-only for want of a distribution."""


class DeviceRound(NamedTuple):
    """Arguments of the device's acceptance."""

    state: SamplingState
    slots: Tensor
    positions: Tensor
    tokens: Tensor
    parents: Tensor | None
    num_nodes: int

    def to(self, device: torch.device) -> DeviceRound:
        """The same round on another device."""
        return DeviceRound(
            SamplingState(*(t.to(device) for t in self.state)),
            self.slots.to(device),
            self.positions.to(device),
            self.tokens.to(device),
            None if self.parents is None else self.parents.to(device),
            self.num_nodes,
        )


def sampling_state(
    params: Sequence[SamplingParams], slots: Tensor, num_slots: int
) -> SamplingState:
    """State in which session slots[b] samples by params[b]; the other slots are greedy."""
    keys = np.stack([stream_key_row(p) for p in params])
    state = SamplingState(
        stream_keys=torch.zeros(num_slots, NUM_STREAMS, dtype=torch.int64),
        temperatures=torch.zeros(num_slots),
        rules=torch.zeros(num_slots, dtype=torch.int32),
    )
    where = slots.long()
    state.stream_keys[where] = torch.from_numpy(keys)
    state.temperatures[where] = torch.tensor([p.temperature for p in params])
    numbers = [RULE_NUMBERS[p.effective_rule] for p in params]
    state.rules[where] = torch.tensor(numbers, dtype=torch.int32)
    return state


def device_round(
    drafts: Drafts, params: Sequence[SamplingParams], positions: Sequence[int], *, seed: int = 0
) -> DeviceRound:
    """A round whose sessions sit in shuffled slots; chains come without parents."""
    batch, num_nodes = len(params), 1 + len(drafts.parents)
    slots = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    depth = np.concatenate([[0], depths(drafts.parents)])
    tokens = np.column_stack([np.full(batch, 7, np.int32), drafts.tokens])
    chain = np.array_equal(drafts.parents, np.arange(-1, num_nodes - 2))
    parents = torch.from_numpy(drafts.parents).to(torch.int32).repeat(batch, 1)
    absolute = np.array(positions)[:, None] + depth
    return DeviceRound(
        state=sampling_state(params, slots, batch + 1),
        slots=slots,
        positions=torch.from_numpy(absolute).to(torch.int32).flatten(),
        tokens=torch.from_numpy(tokens).to(torch.int32).flatten(),
        parents=None if chain else parents,
        num_nodes=num_nodes,
    )


def device_law(
    distributions: Sequence[DraftDistribution | None], num_nodes: int
) -> SparseDistribution:
    """The distributions of all sessions, one after the other."""
    ids, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    offsets, total = np.zeros((len(distributions), num_nodes + 1), np.int32), 0
    for row, distribution in enumerate(distributions):
        offsets[row] = total
        if distribution is not None:
            offsets[row] += distribution.offsets
            ids.append(distribution.ids)
            counts.append(distribution.counts.astype(np.int32))
            total += len(distribution.ids)
    return SparseDistribution.of_offsets(
        ids=torch.from_numpy(np.concatenate(ids)),
        counts=torch.from_numpy(np.concatenate(counts)),
        offsets=torch.from_numpy(offsets),
    )


def dense_law(
    distributions: Sequence[DraftDistribution | None],
    slots: Tensor,
    length: int,
    target_ids: Tensor,
    vocab: int,
) -> DenseChainDistribution:
    """The same distributions as rows of probabilities over the draft vocabulary."""
    columns = torch.full((vocab,), -1, dtype=torch.int32)
    columns[target_ids.long()] = torch.arange(len(target_ids), dtype=torch.int32)
    probs = torch.zeros(len(slots) + 1, length, len(target_ids))
    for distribution, slot in zip(distributions, slots.tolist(), strict=True):
        for step in range(length if distribution is not None else 0):
            assert distribution is not None
            ids, values = distribution.draft_probs(step)
            probs[slot, step, columns[torch.from_numpy(ids)].long()] = torch.from_numpy(
                values
            ).float()
    return DenseChainDistribution(probs, columns, target_ids)


def outcomes(acceptance: DeviceAcceptance) -> list[Outcome]:
    """Checked for form: rows ascend and end in their own index, tokens end in -1."""
    counts, rows, tokens, flags = (t.cpu() for t in acceptance)
    result = []
    for index, count in enumerate(counts.tolist()):
        kept = rows[index, :count].tolist()
        assert kept[0] == 0 and kept == sorted(set(kept))
        assert rows[index, count:].tolist() == list(range(count, rows.shape[1]))
        assert (tokens[index, count:] == -1).all()
        emitted = tuple(tokens[index, :count].tolist())
        words = int(flags[index])
        nodes = tuple(r - 1 for r in kept[1:])
        result.append((nodes, emitted, bool(words & RESAMPLED), bool(words & TARGET_ONLY_FALLBACK)))
    return result


class MixedBatch(NamedTuple):
    """A round of sessions of all rules, as the host and as the device see it."""

    logits: Tensor
    rows: list[AcceptRow]
    drafts: Drafts
    params: list[SamplingParams]
    device: DeviceRound


def mixed_batch(
    batch: int, vocab: int, widths: Sequence[int], *, seed: int, rules: Sequence[Rule] = tuple(Rule)
) -> MixedBatch:
    """Sessions that differ in rule, temperature, seed and position, drafted by `propose_children`.

    Logits depend on the last token, so a walk that reads a wrong row is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab + 1, vocab, generator=generator) * 1.5
    drafted = 0.7 * target + 0.8 * torch.randn(vocab + 1, vocab, generator=generator)
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=(0.6, 1.0, 1.4, 0.0)[(index // len(rules)) % 4],
            rule=rules[index % len(rules)],
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        )
        for index in range(batch)
    ]
    positions = rng.integers(1, 10_000, batch).tolist()
    limits = DistributionLimits(max_ids=max(3, vocab // 3))
    drafts = draft(_by_last_token(drafted), params, positions, widths, limits=limits)
    stride = 1 + len(drafts.parents)
    return MixedBatch(
        logits=verify_logits(_by_last_token(target), drafts),
        rows=accept_rows(drafts, params, positions, stride=stride),
        drafts=drafts,
        params=params,
        device=device_round(drafts, params, positions, seed=seed),
    )


def without_finite_logits(batch: MixedBatch, *, seed: int) -> MixedBatch:
    """The same round with every third session's logits damaged: all of the root's row, or of each
    of its rows at random, is NaN, infinite, or a mixture without a finite logit."""
    rng, stride = np.random.default_rng(seed), batch.device.num_nodes
    logits = batch.logits.clone()
    kinds = [torch.full_like(logits[0], value) for value in (torch.nan, -torch.inf, torch.inf)]
    mixture = kinds[0].clone()
    mixture[::2], mixture[1] = -torch.inf, torch.inf
    kinds.append(mixture)
    for session in range(0, len(batch.rows), 3):
        nodes = [0] if session % 2 else np.flatnonzero(rng.random(stride) < 0.6).tolist()
        for node in nodes:
            logits[session * stride + node] = kinds[int(rng.integers(0, len(kinds)))]
    return batch._replace(logits=logits)


def invalid_outputs(acceptance: DeviceAcceptance) -> list[bool]:
    """Which sessions ended at a row without a finite logit."""
    return [bool(words & INVALID_OUTPUT) for words in acceptance.flags.tolist()]


def _by_last_token(table: Tensor) -> Logits:
    def logits(context: NDArray[np.int64]) -> Tensor:
        last = context[:, -1] if context.shape[1] else np.full(len(context), -1)
        return table[torch.from_numpy(last)]

    return logits


Launch = Callable[..., DeviceAcceptance]
