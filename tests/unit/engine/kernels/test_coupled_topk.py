"""Children under the coupled rule: the PyTorch reference against the host's, the kernel against the
PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engine.draft_sampling import propose_children
from outrider.engine.kernels.drafts.coupled_topk import (
    put_coupled_topk,
    put_coupled_topk_torch,
    put_coupled_topk_triton,
)
from outrider.errors import InvalidRequestError
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import DEVICE, sampling_state
from tests.reference.logits_processor_cases import odd_rows

VOCAB, ROWS, K = 150, 3, 5
RULES = (Rule.COUPLED, Rule.GREEDY, Rule.COUPLED, Rule.TARGET_ONLY, Rule.COUPLED)
PARAMS = [
    SamplingParams(temperature=(0.5, 0.9, 2.0, 1.0, 1.4)[i], rule=rule, seed=2**64 - 7 - i)
    for i, rule in enumerate(RULES)
]
SLOTS = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
STATE = sampling_state(PARAMS, SLOTS, 6)
POSITIONS = torch.arange(len(RULES) * ROWS, dtype=torch.int32) * 3 + 5
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2)) * 3


def _logits() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(len(POSITIONS), VOCAB, generator=generator) * 2


def _run(function: object, logits: Tensor, place: torch.device) -> tuple[Tensor, Tensor]:
    logprobs = torch.full((len(logits), K), 7.0, device=place)
    columns = torch.full((len(logits), K), -7, dtype=torch.int32, device=place)
    assert callable(function)
    function(
        logprobs,
        columns,
        logits.to(place),
        type(STATE)(*(t.to(place) for t in STATE)),
        SLOTS.to(place),
        POSITIONS.to(place),
        ids=IDS.to(place),
    )
    return logprobs.cpu(), columns.cpu()


def test_the_twin_proposes_the_hosts_children_and_leaves_other_rules_alone() -> None:
    logits = _logits()
    logprobs, columns = _run(put_coupled_topk_torch, logits, torch.device("cpu"))
    for index, params in enumerate(PARAMS):
        here = slice(index * ROWS, (index + 1) * ROWS)
        if params.rule is not Rule.COUPLED:
            assert (columns[here] == -7).all() and (logprobs[here] == 7.0).all()
            continue
        expected = propose_children(logits[here], IDS, [params] * ROWS, POSITIONS[here].tolist(), K)
        assert columns[here].tolist() == expected.draft_ids.tolist()
        torch.testing.assert_close(logprobs[here], expected.logprobs)


def test_the_kernel_proposes_nearly_the_twins_children() -> None:
    logits = _logits()
    for row, odd in enumerate(odd_rows(VOCAB, torch.Generator().manual_seed(3))[4:8]):
        logits[row] = odd
    logits[6, 3:] = -torch.inf
    found = _run(put_coupled_topk_triton, logits, DEVICE)
    expected = _run(put_coupled_topk_torch, logits, torch.device("cpu"))
    torch.testing.assert_close(found[0], expected[0], atol=5e-3, rtol=0)
    assert found[1].tolist() == expected[1].tolist()
    assert found[1][6].tolist()[3:] == [-1, -1], "a row of three columns"


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="rows"):
        _run(put_coupled_topk, _logits()[:7], torch.device("cpu"))
