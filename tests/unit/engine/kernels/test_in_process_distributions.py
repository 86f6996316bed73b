"""Laws of own chains: the softmax that is drawn from, written for rejection sessions alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.drafts.in_process_distributions import (
    draft_probs,
    write_distributions_torch,
    write_distributions_triton,
)
from outrider.engine.kernels.session_tensors import SamplingState
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import DEVICE, sampling_state

V, K, UNTOUCHED = 700, 3, -7.0
RULES = (Rule.REJECTION, Rule.COUPLED, Rule.TARGET_ONLY, Rule.GREEDY)

Put = Callable[[Tensor, Tensor, SamplingState, Tensor, Tensor | int], None]


def _on_device(
    distributions: Tensor, logits: Tensor, state: SamplingState, slots: Tensor, levels: Tensor | int
) -> None:
    moved = distributions.to(DEVICE)
    write_distributions_triton(
        moved,
        logits.to(DEVICE),
        SamplingState(*(t.to(DEVICE) for t in state)),
        slots.to(DEVICE),
        levels.to(DEVICE) if isinstance(levels, Tensor) else levels,
        tile=128,
    )
    distributions.copy_(moved)


PUTS = pytest.mark.parametrize("put", [write_distributions_torch, _on_device])


def _batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, SamplingState, Tensor]:
    """Logits, whose rows 1, 5, 9 .. are coupled, 2, 6 .. target-only, 3, 7 .. greedy."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, V, generator=generator) * 3).to(dtype)
    slots = torch.randperm(rows, generator=generator).to(torch.int32)
    params = []
    for row in range(rows):
        rule = RULES[row % len(RULES)]
        heat = 0.0 if rule is Rule.GREEDY else 0.5 + row / 8
        params.append(SamplingParams(temperature=heat, rule=rule, seed=row))
    return logits, sampling_state(params, slots, rows + 1), slots


@PUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rejection_sessions_keep_what_they_draw_from_and_others_nothing(
    put: Put, dtype: torch.dtype
) -> None:
    logits, state, slots = _batch(12, dtype)
    distributions = torch.full((13, K, V), UNTOUCHED)
    put(distributions, logits, state, slots, 1)
    for row, slot in enumerate(slots.tolist()):
        if row % len(RULES):
            assert distributions[slot].eq(UNTOUCHED).all()
            continue
        assert distributions[slot, [0, 2]].eq(UNTOUCHED).all()
        expected = (logits[row].double() / (0.5 + row / 8)).softmax(-1).float()
        torch.testing.assert_close(distributions[slot, 1], expected, rtol=2e-5, atol=1e-9)
    assert distributions[12].eq(UNTOUCHED).all()


@PUTS
def test_rows_may_be_at_levels_of_their_own(put: Put) -> None:
    logits, state, slots = _batch(12, torch.float32)
    levels = torch.arange(12, dtype=torch.int32) // 4
    distributions = torch.full((13, K, V), UNTOUCHED)
    put(distributions, logits, state, slots, levels)
    for row in range(0, 12, 4):
        slot, level = int(slots[row]), int(levels[row])
        torch.testing.assert_close(
            distributions[slot, level], draft_probs(logits, state, slots)[row]
        )
        assert sum(distributions[slot, k].eq(UNTOUCHED).all() for k in range(K)) == K - 1


ROWS: dict[str, tuple[list[float], list[float]]] = {
    "nan": ([0.0, torch.nan, 1.0], [0.26894142, 0.0, 0.73105858]),
    "inf": ([0.0, torch.inf, 1.0], [0.0, 1.0, 0.0]),
    "two infs": ([torch.inf, torch.inf, 1.0], [0.0, 0.0, 0.0]),
    "nothing": ([torch.nan, -torch.inf, torch.nan], [0.0, 0.0, 0.0]),
}


@PUTS
@pytest.mark.parametrize("name", ROWS)
def test_laws_are_those_of_the_tamed_scores_or_none(put: Put, name: str) -> None:
    values, expected = (torch.tensor([row]) for row in ROWS[name])
    logits = torch.full((1, V), -torch.inf)
    logits[:, ::300] = values
    slots = torch.zeros(1, dtype=torch.int32)
    state = sampling_state([SamplingParams(temperature=1.0, rule=Rule.REJECTION)], slots, 2)
    distributions = torch.full((2, K, V), UNTOUCHED)
    put(distributions, logits, state, slots, 0)
    torch.testing.assert_close(distributions[0, 0, ::300], expected[0])
    assert distributions[0, 0].sum() == pytest.approx(float(expected.sum()))


@PUTS
def test_no_rows_write_nothing(put: Put) -> None:
    _, state, _ = _batch(4, torch.float32)
    distributions = torch.full((5, K, V), UNTOUCHED)
    put(distributions, torch.zeros(0, V), state, torch.zeros(0, dtype=torch.int32), 0)
    assert distributions.eq(UNTOUCHED).all()
