"""The device's logits processor: the PyTorch reference against the host's, the kernels against the
PyTorch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.acceptance import AcceptRow, accept_drafts
from outrider.engine.device.slots.logits_slots import MAX_INITIAL_BANS, LogitsSlots
from outrider.engine.kernels.logits_processor.launch import launch_count, launch_process
from outrider.engine.kernels.logits_processor.process import (
    OutputPath,
    count_tokens_torch,
    process_logits,
    process_logits_torch,
)
from outrider.engine.kernels.sampling import choose_tokens_torch, choose_tokens_triton
from outrider.engine.kernels.session_tensors import AllowedTokenBits
from outrider.errors import InvalidRequestError
from outrider.spec.sampling import SamplingParams
from tests.grids import thorough
from tests.reference.device_rounds import DEVICE, sampling_state
from tests.reference.logits_processor_cases import NODES, WarpCase, warp_case

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


LISTED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.3, top_p=1e-9, min_p=0.3),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(temperature=1.0, top_k=49, top_p=0.5, repetition_penalty=0.8),
    SamplingParams(temperature=1e-6, top_k=1000, top_p=0.999999),
    SamplingParams(temperature=1.0, min_p=1.0, banned_ids=(0, 4)),
    SamplingParams(temperature=1.0, top_p=0.5, banned_ids=tuple(range(1, VOCAB))),
    SamplingParams(banned_ids=tuple(range(VOCAB)), logit_bias=((3, 2.0),)),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=-0.3, presence_penalty=0.8),
    SamplingParams(temperature=0.7, frequency_penalty=1.1, logit_bias=((0, 3.5), (49, -100.0))),
    SamplingParams(temperature=1.0, top_k=1, logit_bias=((49, 100.0), (1000, 1.0))),
]


def _twin(case: WarpCase) -> torch.Tensor:
    logits = case.logits.clone()
    process_logits_torch(
        logits, case.warp, case.state, case.slots, case.positions, rows_per_slot=NODES,
        path=case.path, allowed_tokens=case.legal,
    )  # fmt: skip
    return logits


def _kernel(case: WarpCase, *, tile: int = 32, block: int = 16) -> torch.Tensor:
    wide = torch.full((len(case.logits), case.logits.shape[1] + 3), 99.0, device=DEVICE)
    logits = wide[:, : case.logits.shape[1]]
    logits.copy_(case.logits)
    assert case.path.mask is not None
    path = OutputPath(case.path.columns.to(DEVICE), case.path.mask.to(DEVICE))
    allowed_tokens = (
        None if case.legal is None else AllowedTokenBits(*(t.to(DEVICE) for t in case.legal))
    )
    launch_process(
        logits, type(case.warp)(*(t.to(DEVICE) for t in case.warp)),
        type(case.state)(*(t.to(DEVICE) for t in case.state)),
        case.slots.to(DEVICE), case.positions.to(DEVICE),
        rows_per_slot=NODES, path=path, allowed_tokens=allowed_tokens, tile=tile, block=block,
    )  # fmt: skip
    assert (wide[:, case.logits.shape[1] :] == 99.0).all(), "the padding of a row is written"
    return logits.cpu()


@settings(max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 2**16), st.booleans())
def test_the_twin_is_the_hosts_warper(
    params: list[SamplingParams], seed: int, grammars: bool
) -> None:
    case = warp_case(params, VOCAB, seed=seed, grammars=grammars)
    _same(case, case.scores(_twin(case)))


# A seed is another order of the same sessions and kinds of rows; among those in grammars are such
# without.
@pytest.mark.parametrize(
    ("seed", "grammars"),
    [thorough(0, False), thorough(1, False), (2, True), thorough(3, True)],
)
def test_the_kernels_are_the_twin(seed: int, grammars: bool) -> None:
    """Every session meets other rows, and rows of all kinds, with each seed."""
    case = warp_case(LISTED, VOCAB, seed=seed, grammars=grammars)
    torch.testing.assert_close(_kernel(case), _twin(case), rtol=0, atol=0, equal_nan=True)


def test_a_tile_may_be_wider_than_a_row_and_candidates_fewer_than_a_block() -> None:
    case = warp_case(LISTED[:6], 10, seed=5)
    found = _kernel(case, tile=32, block=64)
    torch.testing.assert_close(found, _twin(case), rtol=0, atol=0, equal_nan=True)


CUT = [
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999999),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.5),
    SamplingParams(temperature=0.3, min_p=0.02),
    SamplingParams(temperature=1.0, top_p=0.5, logit_bias=((130, 30.0),)),
]


@pytest.mark.parametrize("behind", [5.0, 40.0, 500.0])
def test_what_is_kept_may_be_in_a_single_tile(behind: float) -> None:
    """Other tiles are looked at less closely, and cut off all the same."""
    case = warp_case(CUT, 160, seed=4)
    case.logits.copy_(torch.randn(case.logits.shape, generator=torch.Generator().manual_seed(8)))
    case.logits[:, 32:64] += behind
    found = _kernel(case)
    torch.testing.assert_close(found, _twin(case), rtol=0, atol=0)
    kept = (found > -torch.inf)[: NODES * 2]
    assert kept.any(dim=1).all()
    if behind > 5.0:
        outside = torch.cat((kept[:, :32], kept[:, 64:]), dim=1)
        assert not outside[:NODES].any(), "top_p = .9 cuts off what is so far behind"


@pytest.mark.parametrize("seen", [None, 0, 2])
def test_rows_of_a_chain_see_the_tokens_before_them(seen: int | None) -> None:
    """None: no tokens at all. With `seen` a row has so many more behind it than its place says."""
    held = LogitsSlots(3, 40, torch.device("cpu"))
    held.begin_session(0, SamplingParams(frequency_penalty=1.0), prompt_ids=[3], output_ids=[4])
    held.begin_session(1, SamplingParams(repetition_penalty=2.0), prompt_ids=[3], output_ids=[4])
    slots = torch.tensor([1, 0], dtype=torch.int32)
    state = sampling_state([SamplingParams()] * 2, slots, 3)
    columns = torch.tensor([[4, 7, 7, 9], [4, 8, 8, -1]], dtype=torch.int32)
    path = None if seen is None else OutputPath(columns[:, : seen + 2], num_visible=seen)
    found = []
    for launch, place in ((launch_process, DEVICE), (process_logits_torch, torch.device("cpu"))):
        logits = torch.full((6, 40), 1.0, device=place)
        launch(
            logits, type(held.state)(*(t.to(place) for t in held.state)), state,
            slots.to(place), torch.full((6,), 9, dtype=torch.int32, device=place),
            rows_per_slot=3,
            path=path and OutputPath(path.columns.to(place), num_visible=path.num_visible),
        )  # fmt: skip
        found.append(logits.cpu())
    assert torch.equal(*found)
    times = [1] * 3 if seen is None else [1 + (seen + row > 0) for row in range(3)]
    assert found[0][3:, 4].tolist() == [1.0 - count for count in times]
    assert found[0][:3, 3].tolist() == [0.5] * 3


@pytest.mark.parametrize("largest", [5e30, torch.inf])
@pytest.mark.parametrize(("position", "expected"), [(3, 2), (4, 3)])
def test_greedy_takes_the_largest_logit_before_and_after_a_ban_ends(
    largest: float, position: int, expected: int
) -> None:
    """Logits beyond MAX_LOGIT, of which a ban below position 4 names the largest."""
    row = torch.tensor([[1.0, 2e30, 3e30, largest, -torch.inf]])
    params, slots = SamplingParams(), torch.zeros(1, dtype=torch.int32)
    accept_row = AcceptRow(
        logits_start=0, sampling=params, position=position, banned_now=(3,), banned_until=4
    )
    assert accept_drafts(row, [accept_row])[0].tokens == (expected,)
    held = LogitsSlots(2, 5, torch.device("cpu"))
    held.begin_session(0, params, banned_first=(3,), banned_until=4)
    state = sampling_state([params], slots, 2)
    for warp, choose, place in (
        (process_logits_torch, choose_tokens_torch, torch.device("cpu")),
        (launch_process, choose_tokens_triton, DEVICE),
    ):
        logits, where = row.to(place, copy=True), slots.to(place)
        heat = type(state)(*(t.to(place) for t in state))
        at = torch.full((1,), position, dtype=torch.int32, device=place)
        changes = type(held.state)(*(t.to(place) for t in held.state))
        warp(logits, changes, heat, where, at, rows_per_slot=1)
        chosen = choose(logits, heat, where, at, rows_per_slot=1, side="target")
        assert chosen.tolist() == [expected]


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


def _one(params: SamplingParams, logits: torch.Tensor) -> tuple[Any, ...]:
    """Arguments for rows of one session in slot 0, at position 3."""
    held = LogitsSlots(2, logits.shape[1], torch.device("cpu"))
    held.begin_session(0, params)
    slots = torch.zeros(1, dtype=torch.int32)
    state = sampling_state([params], slots, 2)
    positions = torch.full((len(logits),), 3, dtype=torch.int32)
    return held.state, state, slots, positions


def test_logits_of_another_shape_or_type_are_refused() -> None:
    logits = torch.zeros(2, 8)
    arguments = _one(SamplingParams(), logits)
    with pytest.raises(InvalidRequestError, match="2 rows"):
        process_logits(logits, *arguments, rows_per_slot=1)
    with pytest.raises(InvalidRequestError, match="bfloat16"):
        process_logits(logits.bfloat16(), *arguments, rows_per_slot=2)
    with pytest.raises(InvalidRequestError, match="columns.* got 7"):
        process_logits(logits[:, :7], *arguments, rows_per_slot=2)


@pytest.mark.parametrize("launch", [count_tokens_torch, launch_count])
@pytest.mark.parametrize("mapped", [False, True])
def test_committed_tokens_are_counted_where_penalties_look(
    launch: Callable[..., None], mapped: bool
) -> None:
    columns = torch.tensor([-1, 0, 1, -1, 2, 3], dtype=torch.int32) if mapped else None
    held = LogitsSlots(4, 4 if mapped else 6, torch.device("cpu"), draft_columns=columns)
    held.begin_session(
        1, SamplingParams(presence_penalty=1.0), prompt_ids=[5, 5, 2], output_ids=[2]
    )
    held.begin_session(2, SamplingParams(banned_ids=(1,)))
    tokens = torch.tensor([[1, 5, 5, 4], [2, 2, -1, -1], [1, 1, 1, 1]], dtype=torch.int32)
    slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    counts = torch.tensor([3, 2, 4], dtype=torch.int32)
    state = type(held.state)(*(t.to(DEVICE) for t in held.state))
    wanted = None if columns is None else columns.to(DEVICE)
    launch(tokens.to(DEVICE), counts.to(DEVICE), state, slots.to(DEVICE), columns=wanted)
    by_id = [0, 2, 3, 0, 0, 5]
    expected = [by_id[i] for i in (1, 2, 4, 5)] if mapped else by_id
    assert state.counts[1].tolist() == expected
    assert not state.counts[[0, 2, 3]].any()


def test_a_slots_next_session_starts_without_a_history() -> None:
    held = LogitsSlots(2, 6, torch.device("cpu"))
    held.begin_session(0, SamplingParams(presence_penalty=1.0, banned_ids=(1,)), prompt_ids=[5])
    held.begin_session(0, SamplingParams())
    assert not held.has_logits_processing(0) and held.state.flags[0] == 0
    held.begin_session(0, SamplingParams(presence_penalty=1.0), output_ids=[3])
    assert held.state.counts[0].tolist() == [0, 0, 0, 2, 0, 0]
    assert held.state.entry_counts[0] == 0
    with pytest.raises(InvalidRequestError, match="stop ids"):
        held.begin_session(1, SamplingParams(), banned_first=range(MAX_INITIAL_BANS + 1))


PEAKED = torch.linspace(0.0, 12.0, 50)[None]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=3), 3),
        (SamplingParams(temperature=1.0, top_p=1e-9), 1),
        (SamplingParams(temperature=1.0, min_p=1.0), 1),
        (SamplingParams(temperature=1.0, banned_ids=tuple(range(49))), 1),
        (SamplingParams(temperature=1.0, top_k=10, top_p=0.5), 3),
    ],
)
def test_what_is_kept_can_be_counted(params: SamplingParams, kept: int) -> None:
    logits = PEAKED.clone()
    process_logits(logits, *_one(params, logits), rows_per_slot=1)
    assert int((logits > -torch.inf).sum()) == kept
    assert torch.equal(logits[0, 50 - kept :], PEAKED[0, 50 - kept :])
