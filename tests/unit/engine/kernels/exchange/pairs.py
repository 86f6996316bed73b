"""Both sides of an exchange over memory of this process: buffers, states, and rows to put."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.exchange.buffers import (
    CHUNK_ROWS,
    DECODE_ROWS,
    ExchangeBuffer,
    ExchangeState,
    new_state,
)
from outrider.engine.kernels.exchange.drafts import new_taken_tokens
from outrider.engine.kernels.exchange.drafts_ahead import ChosenDrafts, new_chosen_drafts
from outrider.engine.kernels.exchange.verdicts import (
    NO_SLOT,
    FollowedSlots,
    TakenRows,
    new_taken_rows,
)

CPU = torch.device("cpu")
SLOTS, OTHERS = 6, 9
"""Session slots of the verifier and of the drafter; the last one is for padding."""
CAPACITY, WIDTH, SIZE, DEPTH = 5, 4, 3, 3
"""Rows of a bank, tokens of a row, width of a feature, banks."""
CHAIN, ENTRIES, OUTCOMES = 3, 4, 5
"""Tokens of a draft, entries of a distribution, outcomes of a session."""
VOCAB = 50
FIRSTS = (DECODE_ROWS, CHUNK_ROWS)


def int32s(values: object) -> Tensor:
    """A tensor int32 of nested lists."""
    return torch.tensor(values, dtype=torch.int32)


def open_state(*, bound_us: int = 1_000_000, number: int = 0) -> ExchangeState:
    """The state of a side that has exchanged `number` rounds, and found what it waited for."""
    state = new_state(CPU)
    state.words.copy_(int32s([number, 1, 0, 1]))
    state.host_control[1] = bound_us
    return state


def noise(*shape: int) -> Tensor:
    """Any words."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


def _buffer(banks: list[tuple[Tensor, ...]]) -> ExchangeBuffer:
    """A buffer of banks, each in memory of its own, at equal distances."""
    number = torch.zeros(1, dtype=torch.int32)
    sizes = [-(-array.nbytes // 64) * 64 for array in banks[0]]
    memory = torch.zeros(len(banks) * sum(sizes), dtype=torch.uint8)
    views, addresses = [], [number.data_ptr()]
    for place, bank in enumerate(banks):
        arrays, at = [number], place * sum(sizes)
        for array, size in zip(bank, sizes, strict=True):
            view = memory[at : at + array.nbytes].view(array.dtype).view(array.shape)
            view.copy_(array)
            arrays.append(view)
            if not place:
                addresses.append(view.data_ptr())
            at += size
        views.append(tuple(arrays))
    return ExchangeBuffer(torch.tensor(addresses, dtype=torch.int64), len(banks), sum(sizes), views)


def verdict_buffer() -> ExchangeBuffer:
    """A verdict buffer with anything in it."""

    def rows() -> tuple[Tensor, ...]:
        return (
            noise(CAPACITY),
            noise(CAPACITY),
            noise(CAPACITY),
            torch.randint(-(2**62), 2**62, (CAPACITY,)),
            noise(CAPACITY, WIDTH),
            torch.randn(CAPACITY, WIDTH, SIZE).bfloat16(),
        )

    return _buffer([(*rows(), *rows(), noise(CAPACITY)) for _ in range(DEPTH)])


def draft_buffer() -> ExchangeBuffer:
    """A draft buffer with nothing in it."""
    arrays = (
        torch.zeros(SLOTS, dtype=torch.int64),
        torch.zeros((SLOTS, CHAIN), dtype=torch.int32),
        torch.zeros((SLOTS, CHAIN), dtype=torch.int32),
        torch.zeros((SLOTS, CHAIN, ENTRIES), dtype=torch.int32),
        torch.zeros((SLOTS, CHAIN, ENTRIES), dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros((SLOTS, OUTCOMES), dtype=torch.int64),
        torch.zeros((SLOTS, OUTCOMES, CHAIN), dtype=torch.int32),
    )
    return _buffer([arrays])


def followed_slots() -> FollowedSlots:
    """The verifier's slots 0 .. 3 are 7, 2, 5 and 4 of the drafter, with 10, 20, .. rows."""
    slot_of = torch.full((SLOTS,), NO_SLOT, dtype=torch.int32)
    slot_of[:4] = int32s([7, 2, 5, 4])
    num_rows = torch.zeros(OTHERS, dtype=torch.int32)
    num_rows[[7, 2, 5, 4]] = int32s([10, 20, 30, 40])
    return FollowedSlots(slot_of, num_rows, torch.full((OTHERS,), 60, dtype=torch.int32))


def taken_rows(rows: int) -> TakenRows:
    """Where rows are taken to."""
    return new_taken_rows(rows, WIDTH, SIZE, torch.bfloat16, CPU)


def taken_tokens() -> Tensor:
    """Where tokens of drafts are taken to."""
    return new_taken_tokens(SLOTS, CHAIN, CPU)


def chosen_drafts() -> ChosenDrafts:
    """Where drafts of outcomes are kept."""
    return new_chosen_drafts(SLOTS, CHAIN, CPU)


class Launch(NamedTuple):
    """Rows of a launch of the verifier."""

    slots: Tensor
    counts: Tensor
    starts: Tensor
    digests: Tensor
    tokens: Tensor
    features: Tensor


def launch(rows: int, *, width: int = WIDTH) -> Launch:
    """Rows of slots 0, 1, .. that continue what `followed_slots` has; then the padding slot's."""
    slots = int32s([*range(min(rows, 4)), *[SLOTS - 1] * max(rows - 4, 0)])
    counts = torch.randint(1, width + 1, (rows,)).int()
    starts = int32s([10, 20, 30, 40, 1, 1, 1][:rows])
    tokens = torch.randint(0, VOCAB, (rows, width)).int()
    digests = torch.randint(-(2**62), 2**62, (SLOTS,))
    return Launch(slots, counts, starts, digests, tokens, torch.randn(rows, width, SIZE).bfloat16())
