"""Drafts cross as they are; what no honest drafter writes is no draft."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.exchange.buffers import ExchangeBuffer
from outrider.engine.kernels.exchange.drafts import (
    advance_digests_torch,
    advance_digests_triton,
    put_drafts_torch,
    put_drafts_triton,
    take_drafts_torch,
    take_drafts_triton,
)
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from tests.unit.engine.kernels.exchange.pairs import (
    CHAIN,
    ENTRIES,
    SLOTS,
    VOCAB,
    chosen_drafts,
    draft_buffer,
    int32s,
    open_state,
    taken_rows,
    taken_tokens,
)

PUTS = [put_drafts_torch, put_drafts_triton]
TAKES = [take_drafts_torch, take_drafts_triton]
DIGESTS = torch.tensor([11, -12, 2**62, 14], dtype=torch.int64)


def put(
    function: Callable[..., None],
    arrays: ExchangeBuffer,
    tokens: Tensor,
    *,
    is_open: int = 1,
) -> None:
    """Put drafts of the slots 3, 0 and 1; the last row is without tokens."""
    state, rows = open_state(), taken_rows(4)
    state.words[1] = is_open
    rows.source_slots[:] = int32s([3, 0, 1, 2])
    rows.counts[:] = int32s([1, 2, 3, 0])
    rows.digests[:] = DIGESTS
    function(arrays, state, rows, tokens, None, length=CHAIN, entries=ENTRIES)


def take(
    function: Callable[..., None],
    arrays: ExchangeBuffer,
    *,
    digests: Tensor | None = None,
    is_open: int = 1,
    is_fresh: int = 1,
) -> tuple[list[int], Tensor]:
    """Take the drafts of the slots 0, 1, 3 and of the padding slot."""
    state, tokens, lengths = open_state(), taken_tokens(), int32s([9, 9, 9, 9])
    state.words[1], state.words[3] = is_open, is_fresh
    if digests is None:
        digests = torch.zeros(SLOTS, dtype=torch.int64) - 1
        digests[[3, 0, 1, 2]] = DIGESTS
    function(
        arrays,
        state,
        int32s([0, 1, 3, SLOTS - 1]),
        digests,
        tokens,
        lengths,
        chosen=chosen_drafts(),
        vocab_size=VOCAB,
    )
    return lengths.tolist(), tokens


@pytest.mark.parametrize("function", PUTS)
@pytest.mark.parametrize("taking", TAKES)
@pytest.mark.parametrize("length", [1, CHAIN])
def test_drafts_cross_as_they_are(
    function: Callable[..., None], taking: Callable[..., None], length: int
) -> None:
    torch.manual_seed(length)
    arrays, tokens = draft_buffer(), torch.randint(0, VOCAB, (4, length)).int()
    put(function, arrays, tokens)
    lengths, taken = take(taking, arrays)
    assert lengths == [length, length, length, 0]
    assert torch.equal(taken[[3, 0, 1], :length], tokens[:3])
    assert bool((taken[:, length:] == -1).all())
    assert bool((taken[2] == -1).all())


@pytest.mark.parametrize("function", PUTS)
def test_a_closed_exchange_puts_no_draft(function: Callable[..., None]) -> None:
    arrays = draft_buffer()
    put(function, arrays, torch.ones((4, CHAIN), dtype=torch.int32), is_open=0)
    assert all(not bool(part.any()) for part in arrays.bank(0))


@pytest.mark.parametrize("function", TAKES)
def test_a_draft_for_another_prefix_is_no_draft(function: Callable[..., None]) -> None:
    arrays = draft_buffer()
    put(put_drafts_torch, arrays, torch.ones((4, CHAIN), dtype=torch.int32))
    digests = torch.zeros(SLOTS, dtype=torch.int64)
    digests[3], digests[0] = DIGESTS[0], DIGESTS[1] + 1
    lengths, taken = take(function, arrays, digests=digests)
    assert lengths[:3] == [0, 0, CHAIN]
    assert bool((taken[[0, 1]] == -1).all())
    for switch in ("is_open", "is_fresh"):
        lengths, taken = take(function, arrays, **{switch: 0})
        assert lengths == [0, 0, 0, 0]
        assert bool((taken[[0, 1, 3]] == -1).all())


@pytest.mark.parametrize("function", TAKES)
@pytest.mark.parametrize("bad", [-1, VOCAB, -(2**31), 2**31 - 1])
def test_a_chain_ends_before_what_is_no_token(function: Callable[..., None], bad: int) -> None:
    arrays = draft_buffer()
    tokens = torch.ones((4, CHAIN), dtype=torch.int32)
    tokens[0, 1] = bad
    tokens[1, 0] = bad
    put(put_drafts_torch, arrays, tokens)
    lengths, taken = take(function, arrays)
    assert lengths == [0, CHAIN, 1, 0]
    assert taken[3].tolist() == [1, -1, -1]


@pytest.mark.parametrize("function", [advance_digests_torch, advance_digests_triton])
def test_digests_are_those_of_the_host(function: Callable[..., None]) -> None:
    torch.manual_seed(3)
    slots, counts = int32s([4, 1, 2]), int32s([0, 3, 2])
    tokens = torch.randint(0, 2**31 - 1, (3, 3)).int()
    tokens[2, 2] = -1
    begun = np.array([EMPTY_DIGEST] * SLOTS, np.uint64)
    digests = torch.from_numpy(begun.view(np.int64).copy())
    function(digests, slots, tokens, counts)
    found = digests.numpy().view(np.uint64)
    for row, slot in enumerate(slots.tolist()):
        expected = extend_digest(EMPTY_DIGEST, tokens[row, : int(counts[row])].tolist())
        assert int(found[slot]) == expected
    assert found[0] == EMPTY_DIGEST
