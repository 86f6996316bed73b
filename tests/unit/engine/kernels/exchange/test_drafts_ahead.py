"""Drafts of outcomes: the right one is found by its digest, and whatever lies there is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.engine.kernels.exchange.buffers import ExchangeBuffer
from outrider.engine.kernels.exchange.drafts import take_drafts_torch, take_drafts_triton
from outrider.engine.kernels.exchange.drafts_ahead import (
    AHEAD_NUMBER,
    NOT_CHOSEN,
    ChosenDrafts,
    choose_drafts_torch,
    choose_drafts_triton,
    put_outcomes_torch,
    put_outcomes_triton,
)
from tests.unit.engine.kernels.exchange.pairs import (
    CHAIN,
    OUTCOMES,
    SLOTS,
    VOCAB,
    chosen_drafts,
    draft_buffer,
    int32s,
    noise,
    open_state,
    taken_rows,
    taken_tokens,
)

PUTS = [put_outcomes_torch, put_outcomes_triton]
CHOICES = ["torch", "triton"]
ROUND = 7
"""The round that the drafter has taken; the verifier runs the next one."""
PADDING = SLOTS - 1
DIGESTS = torch.arange(4 * OUTCOMES, dtype=torch.int64).view(4, OUTCOMES) * 7 - 2**62


def put(function: Callable[..., None], arrays: ExchangeBuffer, *, is_open: int = 1) -> torch.Tensor:
    """Put outcomes of the slots 3, 0 and 1; the last row is without tokens."""
    state, rows = open_state(number=ROUND), taken_rows(4)
    state.words[1] = is_open
    rows.source_slots[:] = int32s([3, 0, 1, 2])
    rows.counts[:] = int32s([1, 2, 3, 0])
    tokens = torch.randint(0, VOCAB, (4, OUTCOMES, CHAIN)).int()
    function(arrays, state, rows, DIGESTS, tokens)
    return tokens


def choose(
    name: str, arrays: ExchangeBuffer, *, number: int = ROUND, is_open: int = 1
) -> ChosenDrafts:
    """Slot 3 has come to outcome 4, slot 0 to outcome 0, slots 1, 2 and padding to none."""
    state, chosen = open_state(number=number), chosen_drafts()
    state.words[1] = is_open
    chosen.outcomes[:] = 2
    digests = torch.full((SLOTS,), 5, dtype=torch.int64)
    digests[3], digests[0], digests[2] = DIGESTS[0, 4], DIGESTS[1, 0], DIGESTS[3, 1]
    digests[PADDING] = 0
    sizes = {"vocab_size": VOCAB, "padding": PADDING}
    slots = int32s([0, 1, 2, 3, PADDING])
    if name == "torch":
        choose_drafts_torch(arrays, state, slots, digests, chosen, **sizes)
    else:
        choose_drafts_triton(arrays, state, slots, digests, chosen, outcomes=OUTCOMES, **sizes)
    return chosen


@pytest.mark.parametrize("function", PUTS)
@pytest.mark.parametrize("name", CHOICES)
def test_the_draft_of_the_outcome_that_came_true_is_chosen(
    function: Callable[..., None], name: str
) -> None:
    arrays = draft_buffer()
    tokens = put(function, arrays)
    chosen = choose(name, arrays)
    assert chosen.outcomes.tolist() == [0, -1, -1, 4, 2, -1]
    assert torch.equal(chosen.tokens[0], tokens[1, 0])
    assert torch.equal(chosen.tokens[3], tokens[0, 4])


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("number", "is_open"), [(ROUND - 1, 1), (ROUND + 1, 1), (ROUND, 0)])
def test_outcomes_of_another_round_are_not_looked_at(name: str, number: int, is_open: int) -> None:
    arrays = draft_buffer()
    put(put_outcomes_torch, arrays)
    chosen = choose(name, arrays, number=number, is_open=is_open)
    assert chosen.outcomes.tolist() == [-1, -1, -1, -1, 2, -1]


@pytest.mark.parametrize("function", PUTS)
def test_a_closed_exchange_puts_nothing(function: Callable[..., None]) -> None:
    arrays = draft_buffer()
    put(function, arrays, is_open=0)
    assert not any(bool(array.any()) for array in arrays.bank(0)[AHEAD_NUMBER:])


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([4, VOCAB, 5], [4, -1, -1]),
        ([4, 5, -3], [4, 5, -1]),
        ([-1, 5, 6], None),
        ([2**31 - 1, 5, 6], None),
    ],
)
def test_a_chain_ends_before_what_is_no_token(
    name: str, tokens: list[int], kept: list[int] | None
) -> None:
    arrays = draft_buffer()
    put(put_outcomes_torch, arrays)
    arrays.bank(0)[AHEAD_NUMBER + 2][3, 4] = int32s(tokens)
    chosen = choose(name, arrays)
    assert int(chosen.outcomes[3]) == (NOT_CHOSEN if kept is None else 4)
    if kept is not None:
        assert chosen.tokens[3].tolist() == kept


@pytest.mark.parametrize("name", CHOICES)
def test_any_words_are_outlived(name: str) -> None:
    torch.manual_seed(3)
    arrays = draft_buffer()
    for array in arrays.bank(0)[AHEAD_NUMBER + 1 :]:
        array.view(torch.int32).copy_(noise(*array.view(torch.int32).shape))
    arrays.bank(0)[AHEAD_NUMBER][0] = ROUND
    assert choose(name, arrays).outcomes.tolist() == [-1, -1, -1, -1, 2, -1]


@pytest.mark.parametrize("function", [take_drafts_torch, take_drafts_triton])
def test_a_chosen_draft_is_taken_whatever_lies_in_the_buffer(
    function: Callable[..., None],
) -> None:
    state, tokens, lengths, chosen = open_state(), taken_tokens(), int32s([9, 9]), chosen_drafts()
    state.words[3] = 0
    chosen.outcomes[2] = 1
    chosen.tokens[2] = int32s([8, 9, -1])
    function(
        draft_buffer(),
        state,
        int32s([2, 0]),
        torch.zeros(SLOTS, dtype=torch.int64) + 5,
        tokens,
        lengths,
        chosen=chosen,
        vocab_size=VOCAB,
    )
    assert lengths.tolist() == [2, 0]
    assert tokens[[2, 0]].tolist() == [[8, 9, -1], [-1, -1, -1]]
