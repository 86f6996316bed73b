"""Rows without a finite logit: found by kernel and reference alike, and nothing chosen there."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kernels.finite import find_finite_rows_torch, find_finite_rows_triton
from outrider.engine.kernels.sampling import choose_tokens_torch, choose_tokens_triton
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import DEVICE, sampling_state

NAN, INF = torch.nan, torch.inf


def rows(vocab: int) -> tuple[torch.Tensor, list[int]]:
    """Rows of logits, and which of them have a finite one."""
    whole = [torch.full((vocab,), value) for value in (NAN, INF, -INF, 0.0, 3.0e38)]
    mixed = torch.full((vocab,), NAN)
    mixed[::2], mixed[vocab // 3] = -INF, INF
    last, first = mixed.clone(), mixed.clone()
    last[-1], first[0] = -7.0, 2.0
    return torch.stack([*whole, mixed, last, first]), [0, 0, 0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 32, 70])
def test_rows_without_a_finite_logit_are_found(vocab: int, dtype: torch.dtype) -> None:
    logits, expected = rows(vocab)
    wide = torch.zeros(len(logits), vocab + 3, dtype=dtype, device=DEVICE)
    wide[:, :vocab] = logits
    if dtype is torch.bfloat16:
        expected[4] = int(wide[4, 0].isfinite())
    assert find_finite_rows_torch(wide[:, :vocab]).tolist() == expected
    assert find_finite_rows_triton(wide[:, :vocab], tile=32).tolist() == expected
    assert find_finite_rows_triton(wide[:0, :vocab]).tolist() == []


@pytest.mark.parametrize("rule", list(Rule))
def test_nothing_is_chosen_from_them_and_other_rows_choose_as_before(rule: Rule) -> None:
    logits, expected = rows(70)
    params = [SamplingParams(temperature=0.8, rule=rule, seed=seed) for seed in range(len(logits))]
    slots = torch.arange(len(logits), dtype=torch.int32)
    state = sampling_state(params, slots, len(logits) + 1)
    positions = torch.full((len(logits),), 9, dtype=torch.int32)
    finite = torch.tensor(expected, dtype=torch.int32)
    for choose, place in ((choose_tokens_torch, "cpu"), (choose_tokens_triton, DEVICE)):
        arguments = (
            logits.to(place), type(state)(*(t.to(place) for t in state)), slots.to(place),
            positions.to(place),
        )  # fmt: skip
        before = choose(*arguments, rows_per_slot=1, side="target")
        after = choose(*arguments, rows_per_slot=1, side="target", finite=finite.to(place))
        wanted = [b if f else -1 for b, f in zip(before.tolist(), expected, strict=True)]
        assert after.tolist() == wanted
