"""The device's warper: the twin against the host's, the kernels against the twin."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kernels.warp import TokenPath, warp_logits_torch
from outrider.engine.kernels.warp_launch import launch_warp
from outrider.spec.sampling import SamplingParams
from tests.reference.device_rounds import DEVICE
from tests.reference.warp_cases import NODES, WarpCase, warp_case

VOCAB = 50
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 7, 49, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    banned_ids=st.sampled_from([(), (), (0, 4), tuple(range(1, VOCAB)), tuple(range(VOCAB))]),
    logit_bias=st.sampled_from([(), (), ((0, 3.5), (7, -100.0)), ((49, 100.0), (1000, 1.0))]),
)


def _twin(case: WarpCase) -> torch.Tensor:
    logits = case.logits.clone()
    warp_logits_torch(
        logits, case.warp, case.state, case.slots, case.positions, rows_per_slot=NODES,
        path=case.path,
    )  # fmt: skip
    return logits


def _kernel(case: WarpCase, *, tile: int = 16, block: int = 8) -> torch.Tensor:
    wide = torch.full((len(case.logits), case.logits.shape[1] + 3), 99.0, device=DEVICE)
    logits = wide[:, : case.logits.shape[1]]
    logits.copy_(case.logits)
    path = TokenPath(case.path.columns.to(DEVICE), case.path.mask.to(DEVICE))
    launch_warp(
        logits, type(case.warp)(*(t.to(DEVICE) for t in case.warp)),
        type(case.state)(*(t.to(DEVICE) for t in case.state)),
        case.slots.to(DEVICE), case.positions.to(DEVICE),
        rows_per_slot=NODES, path=path, tile=tile, block=block,
    )  # fmt: skip
    assert (wide[:, case.logits.shape[1] :] == 99.0).all(), "the padding of a row is written"
    return logits.cpu()


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 2**16))
def test_the_twin_is_the_hosts_warper(params: list[SamplingParams], seed: int) -> None:
    case = warp_case(params, VOCAB, seed=seed)
    _same(case, case.scores(_twin(case)))


@settings(max_examples=15, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**16))
def test_the_kernels_are_the_twin(params: list[SamplingParams], seed: int) -> None:
    case = warp_case(params, VOCAB, seed=seed)
    torch.testing.assert_close(_kernel(case), _twin(case), rtol=0, atol=0, equal_nan=True)


def _same(case: WarpCase, scores: torch.Tensor) -> None:
    """Bit for bit, but for rows that nothing touches: their NaN is left to whoever chooses."""
    for row, expected in enumerate(case.expected):
        slot = case.slots[row // NODES]
        if case.warp.flags[slot]:
            assert torch.equal(scores[row], expected)
        else:
            assert torch.equal(
                case.logits[row].nan_to_num(nan=0.125), _raw(case, row).nan_to_num(nan=0.125)
            )


def _raw(case: WarpCase, row: int) -> torch.Tensor:
    return _twin(case)[row]
