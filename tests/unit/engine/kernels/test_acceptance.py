"""Acceptance on the device: PyTorch reference and kernels against the host's `accept`, decision by
decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import AcceptanceResult, accept_drafts
from outrider.engine.kernels.acceptance.matching import (
    PERIOD_UNIT,
    DeviceAcceptance,
    accept_matching,
    accept_matching_torch,
    accept_matching_triton,
    advance_state_torch,
    advance_state_triton,
)
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
    accept_sampled,
    accept_sampled_torch,
    accept_sampled_triton,
)
from outrider.engine.kernels.finite import find_finite_rows_torch, find_finite_rows_triton
from outrider.engine.kernels.sampling import choose_tokens_torch, choose_tokens_triton
from outrider.engine.kernels.session_tensors import SequenceState
from outrider.errors import InvalidRequestError
from outrider.spec.draft_distribution import make_distribution
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream, uniform
from outrider.spec.sampling import Rule, SamplingParams
from tests.grids import thorough
from tests.reference.acceptance_oracle import judge, softmax
from tests.reference.device_rounds import (
    DEVICE,
    DeviceRound,
    Launch,
    MixedBatch,
    Outcome,
    dense_law,
    device_law,
    device_round,
    invalid_outputs,
    mixed_batch,
    outcomes,
    without_finite_logits,
)
from tests.reference.host_rounds import Drafts, tree_shape

Law = SparseDistribution | DenseChainDistribution | None
CPU = torch.device("cpu")
MATCHING = (Rule.GREEDY, Rule.COUPLED)


def _host(results: Sequence[AcceptanceResult]) -> list[Outcome]:
    return [(r.accepted_nodes, r.tokens, r.resampled, r.used_target_only_fallback) for r in results]


def _judge(
    launch: Launch, logits: Tensor, arguments: DeviceRound, distribution: Law, device: torch.device,
    tile: int | None = None,
) -> list[Outcome]:  # fmt: skip
    """`choose_tokens`, then a function of the form of `accept_sampled`."""
    here, logits = arguments.to(device), logits.to(device)
    chosen = choose_tokens_torch(
        logits, here.state, here.slots, here.positions, rows_per_slot=here.num_nodes, side="target"
    )
    moved = (
        None if distribution is None else type(distribution)(*(t.to(device) for t in distribution))
    )
    extra = {} if tile is None else {"tile": tile}
    result = launch(
        logits, chosen, here.tokens, here.parents, num_nodes=here.num_nodes, state=here.state,
        slots=here.slots, positions=here.positions, distribution=moved, **extra,
    )  # fmt: skip
    return outcomes(result)


def _matched(launch: Launch, batch: MixedBatch, device: torch.device) -> list[Outcome]:
    here, logits = batch.device.to(device), batch.logits.to(device)
    chosen = choose_tokens_torch(
        logits, here.state, here.slots, here.positions, rows_per_slot=here.num_nodes, side="target"
    )
    result = launch(
        chosen, here.tokens, here.parents, num_nodes=here.num_nodes, state=here.state,
        slots=here.slots, positions=here.positions,
    )  # fmt: skip
    return outcomes(result)


def _without_some_laws(batch: MixedBatch) -> MixedBatch:
    rows = [replace(r, distribution=None) if i % 5 == 0 else r for i, r in enumerate(batch.rows)]
    return batch._replace(rows=rows)


def _laws(batch: MixedBatch) -> SparseDistribution:
    return device_law([row.distribution for row in batch.rows], batch.device.num_nodes)


SHAPES: tuple[list[int], ...] = ([], [1], [1, 1, 1, 1], [3, 2], [4, 2, 1])


@pytest.mark.parametrize("widths", SHAPES)
def test_the_matching_twin_judges_as_the_host_does(widths: list[int]) -> None:
    batch = mixed_batch(1000, 24, widths, seed=1, rules=MATCHING)
    expected = _host(accept_drafts(batch.logits, batch.rows))
    assert _matched(accept_matching_torch, batch, CPU) == expected
    if widths:
        assert {r.resampled for r in accept_drafts(batch.logits, batch.rows)} == {True, False}


@pytest.mark.parametrize("widths", SHAPES)
def test_the_matching_kernel_judges_as_the_host_does(widths: list[int]) -> None:
    batch = mixed_batch(64, 24, widths, seed=2, rules=MATCHING)
    expected = _host(accept_drafts(batch.logits, batch.rows))
    assert _matched(accept_matching_triton, batch, DEVICE) == expected


@pytest.mark.parametrize("widths", SHAPES)
def test_the_twin_judges_mixed_rules_as_the_host_does(widths: list[int]) -> None:
    batch = _without_some_laws(mixed_batch(2000, 40, widths, seed=3))
    expected = _host(accept_drafts(batch.logits, batch.rows))
    assert _judge(accept_sampled_torch, batch.logits, batch.device, _laws(batch), CPU) == expected


# A row in one tile and in three; three tiles of the deepest tree read nothing that others do not.
TILED = [(50, widths) for widths in SHAPES] + [(130, widths) for widths in SHAPES[1:4]]


@pytest.mark.parametrize(("vocab", "widths"), [*TILED, thorough(130, []), thorough(130, [4, 2, 1])])
def test_the_kernels_judge_mixed_rules_as_the_host_does(widths: list[int], vocab: int) -> None:
    """Sixteen sessions: every rule at every temperature, one of each rule without a
    distribution."""
    batch = _without_some_laws(mixed_batch(16, vocab, widths, seed=4))
    expected = _host(accept_drafts(batch.logits, batch.rows))
    distributions = _laws(batch)
    assert (
        _judge(accept_sampled_triton, batch.logits, batch.device, distributions, DEVICE, 64)
        == expected
    )


def _scattered(distribution: SparseDistribution, stride: int) -> SparseDistribution:
    """The same with each row's entries at a multiple of `stride`, and no sound entry between."""
    batch, nodes, _ = distribution.ranges.shape
    ids = torch.full((batch * nodes * stride,), 2**31 - 1, dtype=torch.int32)
    counts, ranges = torch.zeros_like(ids), torch.zeros_like(distribution.ranges.contiguous())
    for row, (begin, end) in enumerate(distribution.ranges.flatten(0, 1).tolist()):
        # Later sessions lie first, as slots may.
        place = (batch * nodes - 1 - row) * stride
        here = slice(place, place + end - begin)
        ids[here], counts[here] = distribution.ids[begin:end], distribution.counts[begin:end]
        ranges[row // nodes, row % nodes] = torch.tensor([here.start, here.stop])
    return SparseDistribution(ids, counts, ranges)


def test_distributions_may_lie_apart() -> None:
    batch = _without_some_laws(mixed_batch(16, 50, [1, 1, 1], seed=4))
    expected = _host(accept_drafts(batch.logits, batch.rows))
    apart = _scattered(_laws(batch), 64)
    assert _judge(accept_sampled_torch, batch.logits, batch.device, apart, CPU) == expected
    assert _judge(accept_sampled_triton, batch.logits, batch.device, apart, DEVICE, 64) == expected


@pytest.mark.parametrize("widths", [[1, 1, 1], [3, 2]])
def test_without_laws_rejection_is_target_only(widths: list[int]) -> None:
    batch = mixed_batch(16, 50, widths, seed=5)
    rows = [replace(row, distribution=None) for row in batch.rows]
    expected = _host(accept_drafts(batch.logits, rows))
    assert _judge(accept_sampled_torch, batch.logits, batch.device, None, CPU) == expected
    assert _judge(accept_sampled_triton, batch.logits, batch.device, None, DEVICE, 64) == expected


def _chains(size: int, vocab: int, *, seed: int) -> tuple[MixedBatch, DenseChainDistribution]:
    batch = mixed_batch(size, vocab, [1, 1, 1], seed=seed)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    distributions = [row.distribution for row in batch.rows]
    return batch, dense_law(distributions, batch.device.slots, 4, order.to(torch.int32), vocab)


def test_dense_laws_are_judged_as_the_same_sparse_laws() -> None:
    batch, distribution = _chains(1000, 40, seed=6)
    expected = _host(accept_drafts(batch.logits, batch.rows))
    assert _judge(accept_sampled_torch, batch.logits, batch.device, distribution, CPU) == expected


def test_the_kernels_judge_dense_laws_as_the_host_does_sparse_ones() -> None:
    batch, distribution = _chains(16, 70, seed=7)
    expected = _host(accept_drafts(batch.logits, batch.rows))
    assert (
        _judge(accept_sampled_triton, batch.logits, batch.device, distribution, DEVICE, 32)
        == expected
    )


def _row_after(probs: NDArray[np.float64], node: int) -> NDArray[np.float64]:
    return np.asarray(probs[1 + node])


@pytest.mark.parametrize("widths", [[1, 1, 1], [3, 2]])
def test_the_twin_follows_the_textbook(widths: list[int]) -> None:
    """Against dense float64 vectors, and not only against the host's shortcuts."""
    batch = mixed_batch(200, 20, widths, seed=8)
    found = _judge(accept_sampled_torch, batch.logits, batch.device, _laws(batch), CPU)
    logits, nodes = batch.logits.double().numpy(), batch.device.num_nodes
    for index, row in enumerate(batch.rows):
        distributions = logits[index * nodes : (index + 1) * nodes] / (
            row.sampling.temperature or 1.0
        )
        probs = np.stack([softmax(scores) for scores in distributions])
        tree = batch.drafts.tree(index)
        expected = judge(
            tree, row.distribution, row.sampling, row.position, partial(_row_after, probs)
        )
        assert found[index][:2] == expected


@pytest.mark.parametrize(
    ("launch", "device"), [(accept_sampled_torch, CPU), (accept_sampled_triton, DEVICE)]
)
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TARGET_ONLY, Rule.REJECTION])
def test_placeholders_and_ids_out_of_range_never_stand(
    launch: Launch, device: torch.device, rule: Rule
) -> None:
    """The last two of four children are possible; the others are not there, or not ids."""
    parents = tree_shape([4])
    params = [SamplingParams(temperature=1.0, rule=rule, seed=s) for s in range(24)]
    tokens = np.tile(np.array([-1, 12, 3, 5], dtype=np.int32), (24, 1))
    entries = (np.array([3, 5, 8], np.int32), np.array([9, 3, 4], np.uint16))
    distributions = {0: entries} if rule is Rule.REJECTION else {}
    drafts = Drafts(parents, tokens, [distributions] * 24)
    logits = torch.zeros(24 * 5, 12)
    logits[:, [3, 5]] = 2.0
    found = _judge(
        launch, logits, device_round(drafts, params, [9] * 24),
        device_law([drafts.law(i) for i in range(24)], 5), device,
    )  # fmt: skip
    assert {nodes for nodes, *_ in found} == {(), (2,), (3,)}
    assert all(0 <= token < 12 for _, tokens, *_ in found for token in tokens)


@pytest.mark.parametrize(
    ("launch", "device"), [(accept_sampled_torch, CPU), (accept_sampled_triton, DEVICE)]
)
@pytest.mark.parametrize("dense", [False, True])
def test_a_token_that_the_law_cannot_have_drawn_proves_nothing(
    launch: Launch, device: torch.device, dense: bool
) -> None:
    """It is not accepted, and p itself is sampled: the same token as if nothing was drafted."""
    params = [SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=s) for s in range(16)]
    distribution = make_distribution(1, {0: (np.array([1], np.int32), np.array([9], np.uint16))})
    drafts = Drafts(tree_shape([1]), np.full((16, 1), 2, np.int32), [{}] * 16)
    arguments = device_round(drafts, params, [4] * 16)
    logits = torch.randn(32, 12, generator=torch.Generator().manual_seed(0))
    distributions: Law = device_law([distribution] * 16, 2)
    if dense:
        ids = torch.tensor([1], dtype=torch.int32)
        distributions = dense_law([distribution] * 16, arguments.slots, 1, ids, 12)
    here = arguments
    chosen = choose_tokens_torch(
        logits, here.state, here.slots, here.positions, rows_per_slot=2, side="target"
    )
    found = _judge(launch, logits, arguments, distributions, device)
    assert found == [((), (token,), True, False) for token in chosen[::2].tolist()]


@pytest.mark.parametrize(
    ("launch", "device"), [(accept_sampled_torch, CPU), (accept_sampled_triton, DEVICE)]
)
def test_children_that_hold_all_of_p_leave_nothing_to_draw(
    launch: Launch, device: torch.device
) -> None:
    """The sibling random draw is below 1, so one child stands; the walk ends at a leaf."""
    params = [SamplingParams(temperature=1.0, rule=Rule.TARGET_ONLY, seed=s) for s in range(16)]
    drafts = Drafts(tree_shape([2]), np.tile(np.array([3, 4], np.int32), (16, 1)), [{}] * 16)
    logits = torch.full((16 * 3, 12), -torch.inf)
    logits[:, [3, 4]] = 0.5
    found = _judge(launch, logits, device_round(drafts, params, [4] * 16), None, device)
    assert all(len(nodes) == 1 and not resampled for nodes, _, resampled, _ in found)
    assert {tokens[0] for _, tokens, *_ in found} == {3, 4}


def test_a_dense_law_must_be_long_enough_and_of_a_chain() -> None:
    batch, distribution = _chains(4, 12, seed=9)
    short = distribution._replace(probs=distribution.probs[:, :2])
    with pytest.raises(InvalidRequestError, match="at most 2 draft nodes .*, got 3 nodes"):
        _judge(accept_sampled, batch.logits, batch.device, short, CPU)
    tree = mixed_batch(4, 12, [2], seed=9)
    with pytest.raises(InvalidRequestError, match="of a tree"):
        _judge(accept_sampled, tree.logits, tree.device, distribution, CPU)


def _simulated(
    launch: Launch, rates: Tensor, batch: int, device: torch.device
) -> tuple[list[Outcome], DeviceRound, Tensor]:
    length = len(rates)
    params = [SamplingParams(temperature=0.0, seed=seed) for seed in range(batch)]
    tokens = np.full((batch, length), 6, dtype=np.int32)
    tokens[1::4, length - 1] = -1
    drafts = Drafts(tree_shape([1] * length), tokens, [{}] * batch)
    arguments = device_round(drafts, params, list(range(100, 100 + batch)))
    chosen = torch.arange(batch * (length + 1), dtype=torch.int32) + 1000
    here = arguments.to(device)
    result = launch(
        chosen.to(device), here.tokens, None, num_nodes=length + 1, simulate=rates.to(device),
        state=here.state, slots=here.slots, positions=here.positions,
    )  # fmt: skip
    return outcomes(result), arguments, chosen


@pytest.mark.parametrize(
    ("launch", "device"), [(accept_matching_torch, CPU), (accept_matching_triton, DEVICE)]
)
def test_simulated_acceptance_tosses_the_documented_coin(
    launch: Launch, device: torch.device
) -> None:
    rates = torch.tensor([0.8, 0.5, 0.9])
    found, arguments, chosen = _simulated(launch, rates, 48, device)
    for index, (nodes, tokens, *_) in enumerate(found):
        coins = [
            float(uniform(index, NoiseStream.ACCEPT, 100 + index + i, SHARED_DRAW_ID))
            for i in range(3)
        ]
        drafted = arguments.tokens.view(-1, 4)[index, 1:].tolist()
        stand = [coin < rate for coin, rate in zip(coins, rates.tolist(), strict=True)]
        stand = [s and d >= 0 for s, d in zip(stand, drafted, strict=True)]
        count = (*stand, False).index(False)
        assert nodes == tuple(range(count))
        assert tokens == (*[6] * count, int(chosen[index * 4 + count]))


def test_simulated_acceptance_meets_its_rates() -> None:
    rates = torch.tensor([0.7, 0.4])
    found, _, _ = _simulated(accept_matching_torch, rates, 4000, CPU)
    complete = [nodes for index, (nodes, *_) in enumerate(found) if index % 4 != 1]
    first = np.mean([len(nodes) >= 1 for nodes in complete])
    second = np.mean([len(nodes) == 2 for nodes in complete if nodes])
    assert abs(first - 0.7) < 0.03 and abs(second - 0.4) < 0.04


def _scheduled_lengths(
    launch: Launch, length: float, drafts: int, rounds: int, seeds: Sequence[int],
    device: torch.device,
) -> NDArray[np.int64]:  # fmt: skip
    """Numbers of tokens [rounds, sessions] that a schedule lets rounds emit, one after another."""
    params = [SamplingParams(temperature=0.0, seed=seed) for seed in seeds]
    tokens = np.full((len(seeds), drafts), 6, dtype=np.int32)
    at = np.full(len(seeds), 100)
    found = []
    for _ in range(rounds):
        shape = Drafts(tree_shape([1] * drafts), tokens, [{}] * len(seeds))
        here = device_round(shape, params, at.tolist()).to(device)
        result = launch(
            torch.full_like(here.tokens, 7), here.tokens, None, num_nodes=drafts + 1,
            simulate=round(length * PERIOD_UNIT), state=here.state, slots=here.slots,
            positions=here.positions,
        )  # fmt: skip
        found.append(result.counts.cpu().numpy().astype(np.int64))
        at = at + found[-1]
    return np.array(found)


@pytest.mark.parametrize("length", [1.0, 1.3, 2.0, 2.6, 3.9375, 5.0])
def test_a_scheduled_length_varies_by_one_token_and_its_running_mean_not_at_all(
    length: float,
) -> None:
    lengths = _scheduled_lengths(accept_matching_torch, length, 4, 120, range(12), CPU)
    # A session begins somewhere in a period, so that its first round may be shorter.
    assert (lengths[0] >= 1).all() and (lengths[0] <= math.ceil(length)).all()
    later = lengths[1:]
    assert set(np.unique(later)) <= {math.floor(length), math.ceil(length)}
    rounds = np.arange(1, len(later) + 1)[:, None]
    assert (np.abs(np.cumsum(later, 0) - length * rounds) < 1.001).all()
    if length != math.floor(length):
        assert len({tuple(session) for session in lengths.T}) > 3, "seeds begin apart"
    again = _scheduled_lengths(accept_matching_torch, length, 4, 120, range(12), CPU)
    assert (again == lengths).all()


@pytest.mark.parametrize("length", [1.0, 2.6, 5.0])
def test_the_kernel_schedules_as_the_reference_does(length: float) -> None:
    expected = _scheduled_lengths(accept_matching_torch, length, 4, 6, range(5), CPU)
    found = _scheduled_lengths(accept_matching_triton, length, 4, 6, range(5), DEVICE)
    assert (found == expected).all()


@pytest.mark.parametrize("kind", ["matching", "sparse", "dense"])
@pytest.mark.parametrize("widths", [[], [1, 1, 1], [3, 2]])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_rows_without_a_finite_logit_end_their_own_session(
    kernels: bool, widths: list[int], kind: str
) -> None:
    if kind == "dense" and len(widths) != sum(widths):
        return  # Of chains only.
    rules = MATCHING if kind == "matching" else tuple(Rule)
    size = 12 if kernels else 48  # The interpreter is slow.
    calm = mixed_batch(size, 24, widths, seed=12, rules=rules)
    batch = without_finite_logits(calm, seed=12)
    expected = accept_drafts(batch.logits, batch.rows)
    healthy = accept_drafts(calm.logits, calm.rows)
    assert all(e == h for i, (e, h) in enumerate(zip(expected, healthy, strict=True)) if i % 3)
    assert 2 <= sum(e.invalid_output for e in expected) <= size // 3
    device = DEVICE if kernels else CPU
    here, logits = batch.device.to(device), batch.logits.to(device)
    finite = find_finite_rows_triton(logits) if kernels else find_finite_rows_torch(logits)
    choose = choose_tokens_triton if kernels else choose_tokens_torch
    where = (here.state, here.slots, here.positions)
    chosen = choose(logits, *where, rows_per_slot=here.num_nodes, side="target", finite=finite)
    common: dict[str, Any] = {
        "num_nodes": here.num_nodes,
        "state": here.state,
        "slots": here.slots,
        "positions": here.positions,
    }
    if kind == "matching":
        match = accept_matching_triton if kernels else accept_matching_torch
        found = match(chosen, here.tokens, here.parents, **common)
    else:
        distributions: Law = _laws(batch)
        if kind == "dense":
            ids = torch.arange(24, dtype=torch.int32)
            own = [row.distribution for row in batch.rows]
            distributions = dense_law(own, batch.device.slots, len(widths), ids, 24)
        distributions = type(distributions)(*(t.to(device) for t in distributions))
        sample = accept_sampled_triton if kernels else accept_sampled_torch
        found = sample(
            logits, chosen, here.tokens, here.parents, distribution=distributions, **common
        )
    assert invalid_outputs(found) == [e.invalid_output for e in expected]
    if kind == "dense":
        # Where a chain has no distribution the dense form of it judges by zeros.
        return
    assert outcomes(found) == _host(expected)


def test_trees_are_not_simulated() -> None:
    batch = mixed_batch(4, 12, [2], seed=1, rules=MATCHING).device
    with pytest.raises(InvalidRequestError, match="chains"):
        accept_matching(
            batch.tokens, batch.tokens, batch.parents, num_nodes=3, simulate=torch.ones(2),
            state=batch.state, slots=batch.slots, positions=batch.positions,
        )  # fmt: skip


@pytest.mark.parametrize("advance", [advance_state_torch, advance_state_triton])
def test_state_advances_for_all_but_the_padding_slot(advance: object) -> None:
    device = DEVICE if advance is advance_state_triton else CPU

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    acceptance = DeviceAcceptance(
        counts=ints(2, 1, 3, 1, 2),
        rows=torch.zeros(5, 3, dtype=torch.int32, device=device),
        tokens=ints(11, 12, -1, 21, -1, -1, 31, 32, 33, 41, -1, -1, 51, 52, -1).view(5, 3),
        flags=ints(0, 0, 0, 0, 0),
    )
    sequence = SequenceState(
        tables=torch.zeros(6, 2, dtype=torch.int32, device=device),
        lengths=ints(10, 20, 30, 40, 50, 60),
        roots=ints(1, 2, 3, 4, 5, 6),
    )
    assert callable(advance)
    advance(acceptance, sequence, ints(3, 5, 0, 5, 4))
    assert sequence.lengths.tolist() == [13, 20, 30, 42, 52, 60]
    assert sequence.roots.tolist() == [33, 2, 3, 12, 52, 6]
