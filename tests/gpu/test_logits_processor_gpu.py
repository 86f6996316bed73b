"""The logits processor's kernels on a GPU at real vocabulary sizes, against the PyTorch reference
and the host."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.drafts.coupled_topk import (
    put_coupled_topk_torch,
    put_coupled_topk_triton,
)
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.process import (
    count_tokens,
    count_tokens_torch,
    process_logits,
)
from outrider.engine.kernels.session_tensors import AllowedTokenBits
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.device_rounds import sampling_state
from tests.reference.logits_processor_cases import NODES, odd_rows, warp_case

pytestmark = pytest.mark.gpu

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.7, top_p=0.999999),
    SamplingParams(temperature=1.0, top_p=1e-9, min_p=0.01),
    SamplingParams(temperature=0.3, top_k=50),
    SamplingParams(temperature=1.0, top_k=5000, top_p=0.95, repetition_penalty=1.3),
    SamplingParams(temperature=1e-6, top_k=7, top_p=0.5),
    SamplingParams(temperature=1.0, min_p=0.05, banned_ids=tuple(range(1024))),
    SamplingParams(frequency_penalty=-0.7, presence_penalty=0.3),
    SamplingParams(logit_bias=tuple((3 * i, 1.5 - i / 100) for i in range(1024))),
    SamplingParams(temperature=2.0, top_k=1, logit_bias=((5, 100.0), (6, -100.0))),
]


@pytest.mark.parametrize("vocab", [100, 8193, 49_152, 128_256, 262_144])
@pytest.mark.parametrize(("seed", "grammars"), [(0, False), (1, False), (2, True), (3, True)])
def test_the_kernels_keep_what_the_host_keeps(
    vocab: int, seed: int, grammars: bool, device: torch.device
) -> None:
    case = warp_case(SETTINGS, vocab, seed=seed, grammars=grammars)
    logits = case.logits.to(device)
    assert case.path.mask is not None
    process_logits(
        logits,
        type(case.warp)(*(t.to(device) for t in case.warp)),
        type(case.state)(*(t.to(device) for t in case.state)),
        case.slots.to(device),
        case.positions.to(device),
        rows_per_slot=NODES,
        path=OutputPath(case.path.columns.to(device), case.path.mask.to(device)),
        allowed_tokens=None
        if case.legal is None
        else AllowedTokenBits(*(t.to(device) for t in case.legal)),
    )
    scores = case.scores(logits.cpu())
    for row, expected in enumerate(case.expected):
        if case.warp.flags[case.slots[row // NODES]]:
            assert torch.equal(scores[row], expected), f"row {row}"


def test_a_graph_replays_the_warper(device: torch.device) -> None:
    """The list of candidates starts empty at every replay."""
    case = warp_case(SETTINGS, 5000, seed=1)
    logits = case.logits.to(device)
    arguments = (
        type(case.warp)(*(t.to(device) for t in case.warp)),
        type(case.state)(*(t.to(device) for t in case.state)),
        case.slots.to(device),
        case.positions.to(device),
    )
    source = logits.clone()

    def run() -> None:
        logits.copy_(source)
        process_logits(logits, *arguments, rows_per_slot=NODES)

    run()
    first = logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(logits, first, rtol=0, atol=0, equal_nan=True)


def test_counting_agrees_with_the_twin(device: torch.device) -> None:
    found = []
    for place, count in ((device, count_tokens), (torch.device("cpu"), count_tokens_torch)):
        held = LogitsSlots(9, 5000, place)
        for slot in range(8):
            held.begin_session(
                slot, SamplingParams(presence_penalty=float(slot % 2)), prompt_ids=[4, 4]
            )
        tokens = (torch.arange(8 * 33, dtype=torch.int32) * 7 % 40 - 1).view(8, 33)
        counts = torch.arange(8, dtype=torch.int32) * 4 + 1
        slots = torch.arange(8, dtype=torch.int32)
        count(tokens.to(place), counts.to(place), held.state, slots.to(place))
        found.append(held.state.counts.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coupled_children_are_nearly_the_twins(dtype: torch.dtype, device: torch.device) -> None:
    """The kernel's noise is an estimate: scores are close, and ids but for near ties."""
    rules = (Rule.COUPLED, Rule.GREEDY, Rule.COUPLED, Rule.TARGET_ONLY)
    params = [SamplingParams(temperature=0.8, rule=rule, seed=7) for rule in rules]
    slots = torch.arange(4, dtype=torch.int32)
    state = sampling_state(params, slots, 5)
    rows = odd_rows(32_000, torch.Generator().manual_seed(1))
    logits = torch.stack([rows[i % len(rows)] for i in range(40)]).to(dtype)
    ids = torch.randperm(32_000, generator=torch.Generator().manual_seed(2)) * 3
    positions = torch.arange(40, dtype=torch.int32)
    found = []
    for place, function in (
        (device, put_coupled_topk_triton),
        (torch.device("cpu"), put_coupled_topk_torch),
    ):
        logprobs, columns = torch.zeros(40, 8), torch.zeros(40, 8, dtype=torch.int32)
        logprobs, columns = logprobs.to(place), columns.to(place)
        function(
            logprobs,
            columns,
            logits.to(place),
            type(state)(*(t.to(place) for t in state)),
            slots.to(place),
            positions.to(place),
            ids=ids.to(place),
        )
        found.append((logprobs.cpu(), columns.cpu()))
    torch.testing.assert_close(found[0][0], found[1][0], atol=5e-3, rtol=1e-4)
    scores = found[1][0]
    gaps = (scores[:, :-1] - scores[:, 1:]).abs()
    # An id that differs has a neighbour about as good; what stands behind the last is not told.
    near = torch.zeros_like(scores, dtype=torch.bool)
    near[:, :-1] |= gaps < 1e-2
    near[:, 1:] |= gaps < 1e-2
    near[:, -1] = True
    assert (near | (found[0][1] == found[1][1])).all()
