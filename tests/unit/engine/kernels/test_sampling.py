"""Tokens from logits: the PyTorch reference against the host's functions, the kernels against the
PyTorch reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.drafts.topk import (
    MAX_TOPK,
    log_softmax_topk,
    log_softmax_topk_torch,
    log_softmax_topk_triton,
)
from outrider.engine.kernels.sampling import (
    Side,
    choose_tokens,
    choose_tokens_torch,
    choose_tokens_triton,
)
from outrider.engine.kernels.session_tensors import SamplingState
from outrider.engine.logits_processor import EMPTY_HISTORY, apply_logits_processor, plain_argmax
from outrider.engine.noise import noise_keys, perturbed_argmax
from outrider.errors import InvalidRequestError
from outrider.spec.noise import NoiseStream
from outrider.spec.sampling import Rule, SamplingParams
from tests.grids import thorough
from tests.reference.device_rounds import DEVICE, sampling_state

STREAMS: dict[Side, dict[Rule, NoiseStream | None]] = {
    "target": {
        Rule.GREEDY: None,
        Rule.COUPLED: NoiseStream.TARGET,
        Rule.TARGET_ONLY: NoiseStream.RECOVER,
        Rule.REJECTION: NoiseStream.RECOVER,
    },
    "draft": {
        Rule.GREEDY: None,
        Rule.COUPLED: NoiseStream.TARGET,
        Rule.TARGET_ONLY: None,
        Rule.REJECTION: NoiseStream.DRAFT,
    },
}
SIDES: tuple[Side, ...] = ("target", "draft")


def _params(count: int) -> list[SamplingParams]:
    temperatures = (0.7, 1.0, 2.0, 1e-7, 0.0)
    rules = tuple(Rule)
    return [
        SamplingParams(
            temperature=temperatures[(index // 4) % 5],
            rule=rules[index % 4],
            seed=2**64 - 1 - index,
        )
        for index in range(count)
    ]


def _logits(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """Random rows, the first few with everything that can go wrong."""
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3
    odd = torch.zeros(8, columns)
    odd[0] = torch.nan
    odd[1, ::2] = torch.nan
    odd[2, 5:9] = torch.inf
    odd[3] = -torch.inf
    odd[4] = 2.0
    odd[5, 3] = 1e31
    odd[6, 1:] = -torch.inf
    odd[7, [4, 7]] = 1.0
    logits[: min(8, rows)] = odd[:rows]
    return logits


def _expected(
    logits: Tensor, params: list[SamplingParams], positions: Tensor, side: Side, ids: Tensor | None
) -> list[int]:
    """Row by row through the host's functions."""
    result = []
    for row, (one, position) in enumerate(zip(params, positions.tolist(), strict=True)):
        scores = logits[row : row + 1].to(torch.float32)
        stream = STREAMS[side][one.effective_rule]
        if stream is None:
            result.append(int(plain_argmax(scores)))
        else:
            scores = apply_logits_processor(scores, [one], [EMPTY_HISTORY])
            keys = noise_keys([one.stream_key(stream)], [position])
            result.append(int(perturbed_argmax(scores, keys, ids)))
    return result


class _Case:
    def __init__(self, batch: int, rows_per_slot: int, columns: int) -> None:
        self.params = _params(batch)
        generator = torch.Generator().manual_seed(batch)
        self.slots = torch.randperm(batch, generator=generator).to(torch.int32)
        self.state = sampling_state(self.params, self.slots, batch + 1)
        rows = batch * rows_per_slot
        self.by_row = [p for p in self.params for _ in range(rows_per_slot)]
        self.positions = torch.randint(0, 10_000, (rows,), generator=generator, dtype=torch.int32)
        # In an order in which every kind of session meets every kind of row.
        shuffled = torch.randperm(rows, generator=generator)
        self.logits = _logits(rows, columns)[shuffled]

    def on(self, device: torch.device) -> tuple[Tensor, SamplingState, Tensor, Tensor]:
        state = SamplingState(*(t.to(device) for t in self.state))
        return self.logits.to(device), state, self.slots.to(device), self.positions.to(device)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("columns", [1, 50, 1500])
def test_the_twin_chooses_as_the_host_does(side: Side, columns: int) -> None:
    case = _Case(batch=60, rows_per_slot=2, columns=max(columns, 10))
    case.logits = case.logits[:, :columns]
    ids = torch.randperm(columns) + 1000
    wanted = ids if side == "draft" else None
    chosen = choose_tokens(*case.on(torch.device("cpu")), rows_per_slot=2, side=side, ids=wanted)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == _expected(case.logits, case.by_row, case.positions, side, wanted)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [None, 256, 130])
def test_the_kernel_chooses_as_the_twin_does(
    side: Side, dtype: torch.dtype, num_columns: int | None
) -> None:
    case = _Case(batch=20, rows_per_slot=1, columns=300)
    logits, state, slots, positions = case.on(DEVICE)
    wide = torch.full((20, 320), 99.0, dtype=dtype, device=DEVICE)
    wide[:, :300] = logits.to(dtype)
    logits = wide[:, :300]
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    wanted = ids if side == "draft" else None
    chosen = choose_tokens_triton(
        logits, state, slots, positions, rows_per_slot=1, side=side, ids=wanted,
        num_columns=num_columns, tile=128,
    )  # fmt: skip
    expected = choose_tokens_torch(
        logits, state, slots, positions, rows_per_slot=1, side=side, ids=wanted,
        num_columns=num_columns,
    )  # fmt: skip
    assert chosen.tolist() == expected.tolist()


def test_rows_find_their_slot_in_the_kernel() -> None:
    case = _Case(batch=6, rows_per_slot=3, columns=40)
    arguments = case.on(DEVICE)
    chosen = choose_tokens_triton(*arguments, rows_per_slot=3, side="target")
    expected = choose_tokens_torch(*arguments, rows_per_slot=3, side="target")
    assert chosen.tolist() == expected.tolist()
    assert choose_tokens_triton(
        arguments[0][:0], *arguments[1:], rows_per_slot=3, side="target"
    ).shape == (0,)


def test_rows_that_do_not_fit_the_slots_are_refused() -> None:
    case = _Case(batch=6, rows_per_slot=3, columns=40)
    with pytest.raises(InvalidRequestError, match="18 rows"):
        choose_tokens(*case.on(torch.device("cpu")), rows_per_slot=2, side="target")


def _topk_oracle(logits: Tensor, k: int, temperature: float) -> tuple[list[int], list[float]]:
    scores = np.nan_to_num(logits.numpy(), nan=-np.inf, posinf=1e30, neginf=-np.inf)
    scores = (np.minimum(scores, np.float32(1e30)) / np.float32(temperature)).astype(np.float64)
    order = [c for c in np.argsort(-scores, kind="stable") if scores[c] > -np.inf][:k]
    if not order:
        return [], []
    top = scores.max()
    logsumexp = top + np.log(np.exp(scores - top).sum())
    return [int(c) for c in order], [float(scores[c] - logsumexp) for c in order]


@pytest.mark.parametrize("k", [1, 8, MAX_TOPK])
@pytest.mark.parametrize("heated", [False, True])
def test_the_topk_twin_is_the_formula(k: int, heated: bool) -> None:
    logits = _logits(20, 200)
    logits[9, ::2] = -0.0
    logits[9, 1::2] = 0.0
    temperatures = torch.linspace(-0.2, 2.0, 20) if heated else None
    logprobs, columns = log_softmax_topk(logits, k, temperatures=temperatures)
    for row in range(20):
        temperature = 1.0 if temperatures is None else float(temperatures[row])
        order, values = _topk_oracle(logits[row], k, temperature if temperature > 0 else 1.0)
        missing = k - len(order)
        assert columns[row].tolist() == order + [-1] * missing
        assert logprobs[row].tolist() == pytest.approx(values + [-np.inf] * missing, abs=1e-5)


@pytest.mark.parametrize("k", [1, thorough(8), MAX_TOPK])
@pytest.mark.parametrize("heated", [False, True])
@pytest.mark.parametrize("columns", [10, 300])
def test_the_topk_kernel_agrees_with_its_twin(k: int, heated: bool, columns: int) -> None:
    logits = _logits(14, columns).to(DEVICE)
    logits[9] = logits[9].round()
    logits[10, ::2] = -0.0
    logits[10, 1::2] = 0.0
    temperatures = torch.linspace(-0.2, 2.0, 14, device=DEVICE) if heated else None
    logprobs, chosen = log_softmax_topk_triton(logits, k, temperatures=temperatures, tile=64)
    expected, order = log_softmax_topk_torch(logits, k, temperatures=temperatures)
    assert chosen.tolist() == order.tolist()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [0, MAX_TOPK + 1])
def test_topk_refuses_other_sizes(k: int) -> None:
    with pytest.raises(InvalidRequestError, match="k must be"):
        log_softmax_topk(torch.zeros(1, 40), k)
