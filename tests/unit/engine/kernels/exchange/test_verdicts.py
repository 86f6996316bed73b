"""Rows of a round cross as they are; rows that no honest verifier writes are nobody's rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.exchange.buffers import (
    CHUNK_ROWS,
    DECODE_ROWS,
    VERDICT_FIELDS,
    ExchangeBuffer,
)
from outrider.engine.kernels.exchange.verdicts import (
    FAULT_ABSENT,
    FAULT_COUNT,
    FAULT_NONE,
    FAULT_ROOM,
    FAULT_SLOT,
    FAULT_START,
    FAULT_TOKEN,
    NO_SLOT,
    FollowedSlots,
    TakenRows,
    put_rows_torch,
    put_rows_triton,
    take_rows_torch,
    take_rows_triton,
)
from tests.unit.engine.kernels.exchange.pairs import (
    CAPACITY,
    OTHERS,
    SLOTS,
    VOCAB,
    WIDTH,
    Launch,
    followed_slots,
    int32s,
    launch,
    open_state,
    taken_rows,
    verdict_buffer,
)

PADDING = OTHERS - 1
PUTS = [put_rows_torch, put_rows_triton]
TAKES = [take_rows_torch, take_rows_triton]


OUTCOME_OF_SLOT = int32s([4, -1, 0, 9, 7, 7])
ROUND = 7
"""Number of the round that crosses; it does not go to the first bank."""


def put(
    function: Callable[..., None],
    arrays: ExchangeBuffer,
    rows: Launch,
    *,
    is_open: int = 1,
    first: int = DECODE_ROWS,
) -> None:
    """Put rows into a buffer."""
    state = open_state(number=ROUND - 1)
    state.words[1] = is_open
    function(
        arrays,
        state,
        **rows._asdict(),
        outcomes=OUTCOME_OF_SLOT if first == DECODE_ROWS else None,
        first=first,
        capacity=CAPACITY,
        width=WIDTH,
        padding=SLOTS - 1,
    )


def take(
    function: Callable[..., None],
    arrays: ExchangeBuffer,
    followed: FollowedSlots,
    rows: int,
    *,
    is_open: int = 1,
    first: int = DECODE_ROWS,
) -> TakenRows:
    """Take rows from a buffer."""
    state, taken = open_state(number=ROUND), taken_rows(rows)
    state.words[1] = is_open
    function(
        arrays,
        state,
        followed,
        taken,
        first=first,
        padding=PADDING,
        vocab_size=VOCAB,
        rows_ahead=3,
    )
    return taken


def array_of(arrays: ExchangeBuffer, name: str) -> Tensor:
    """An array of the decode rows of the round."""
    return arrays.bank(ROUND)[VERDICT_FIELDS.index(name)]


@pytest.mark.parametrize("function", PUTS)
@pytest.mark.parametrize("taking", TAKES)
@pytest.mark.parametrize("first", [DECODE_ROWS, CHUNK_ROWS])
@pytest.mark.parametrize(("rows", "width"), [(1, WIDTH), (3, 2), (5, WIDTH)])
def test_rows_cross_as_they_are(
    function: Callable[..., None], taking: Callable[..., None], first: int, rows: int, width: int
) -> None:
    torch.manual_seed(rows)
    arrays, followed, given = verdict_buffer(), followed_slots(), launch(rows, width=width)
    put(function, arrays, given, first=first)
    taken = take(taking, arrays, followed, CAPACITY, first=first)
    for row in range(CAPACITY):
        if row >= min(rows, 4):
            assert taken.faults[row] == FAULT_ABSENT
            assert taken.counts[row] == 0 and taken.slots[row] == PADDING
            assert taken.source_slots[row] == NO_SLOT
            continue
        count = int(given.counts[row])
        assert taken.faults[row] == FAULT_NONE
        assert taken.source_slots[row] == given.slots[row]
        assert taken.slots[row] == [7, 2, 5, 4][row]
        assert taken.counts[row] == count and taken.starts[row] == given.starts[row]
        assert taken.digests[row] == given.digests[row]
        assert torch.equal(taken.tokens[row, :count], given.tokens[row, :count])
        assert bool((taken.tokens[row, count:] == -1).all())
        assert torch.equal(taken.features[row, :count], given.features[row, :count])
        outcome = OUTCOME_OF_SLOT[row] if first == DECODE_ROWS else -1
        assert taken.outcomes[row] == outcome
        assert followed.num_rows[taken.slots[row]] == given.starts[row] + count


@pytest.mark.parametrize("function", PUTS)
def test_a_closed_exchange_puts_nothing(function: Callable[..., None]) -> None:
    arrays = verdict_buffer()
    before = [array.clone() for array in arrays.bank(ROUND)]
    put(function, arrays, launch(3), is_open=0)
    assert all(torch.equal(*pair) for pair in zip(arrays.bank(ROUND), before, strict=True))


@pytest.mark.parametrize("function", TAKES)
def test_a_closed_exchange_takes_nothing(function: Callable[..., None]) -> None:
    arrays, followed = verdict_buffer(), followed_slots()
    put(put_rows_torch, arrays, launch(3))
    arrays.views.clear()
    arrays.addresses.zero_()
    taken = take(function, arrays, followed, 3, is_open=0)
    assert taken.faults.tolist() == [FAULT_ABSENT] * 3
    assert taken.counts.tolist() == [0] * 3
    assert torch.equal(followed.num_rows, followed_slots().num_rows)


@pytest.mark.parametrize("function", TAKES)
@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("slots", SLOTS, FAULT_SLOT),
        ("slots", 4, FAULT_SLOT),
        ("slots", -7, FAULT_SLOT),
        ("slots", 2**31 - 1, FAULT_SLOT),
        ("counts", WIDTH + 1, FAULT_COUNT),
        ("counts", -1, FAULT_COUNT),
        ("counts", -(2**31), FAULT_COUNT),
        ("starts", 21, FAULT_START),
        ("starts", -1, FAULT_START),
        ("starts", 2**31 - 1, FAULT_START),
        ("tokens", VOCAB, FAULT_TOKEN),
        ("tokens", -1, FAULT_TOKEN),
        ("tokens", 2**31 - 1, FAULT_TOKEN),
    ],
)
def test_a_bad_row_is_nobodys_and_costs_no_other(
    function: Callable[..., None], field: str, value: int, fault: int
) -> None:
    arrays, followed, given = verdict_buffer(), followed_slots(), launch(3)
    put(put_rows_torch, arrays, given)
    array_of(arrays, field).view(CAPACITY, -1)[1, 0] = value
    taken = take(function, arrays, followed, 3)
    assert taken.faults.tolist() == [FAULT_NONE, fault, FAULT_NONE]
    assert taken.slots.tolist() == [7, PADDING, 5]
    assert taken.counts[1] == 0 and taken.source_slots[1] == NO_SLOT
    assert followed.num_rows[2] == 20


@pytest.mark.parametrize("function", TAKES)
def test_rows_beyond_what_is_reserved_are_not_taken(function: Callable[..., None]) -> None:
    arrays, followed, given = verdict_buffer(), followed_slots(), launch(2)
    put(put_rows_torch, arrays, given)
    count = int(given.counts[0])
    # Three rows are drafted behind those of the session.
    followed.max_rows[7] = 10 + count + 2
    followed.max_rows[2] = 20 + int(given.counts[1]) + 3
    taken = take(function, arrays, followed, 2)
    assert taken.faults.tolist() == [FAULT_ROOM, FAULT_NONE]


@pytest.mark.parametrize("function", TAKES)
def test_any_bytes_are_rows_or_faults(function: Callable[..., None]) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        arrays, followed = verdict_buffer(), followed_slots()
        taken = take(function, arrays, followed, CAPACITY)
        assert bool((taken.counts <= WIDTH).all()) and bool((taken.counts >= 0).all())
        assert bool(((taken.slots >= 0) & (taken.slots < OTHERS)).all())
        assert bool((taken.tokens < VOCAB).all())
        assert bool((taken.faults[taken.counts > 0] == FAULT_NONE).all())


def test_kernel_and_reference_take_the_same() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        arrays, given = verdict_buffer(), launch(4)
        put(put_rows_torch, arrays, given)
        for name in ("slots", "counts", "starts"):
            row = int(torch.randint(0, 4, (1,)))
            array_of(arrays, name)[row] = int32s([int(torch.randint(-3, 45, (1,)))])[0]
        ends = []
        results = []
        for function in TAKES:
            followed = followed_slots()
            results.append(take(function, arrays, followed, CAPACITY))
            ends.append(followed.num_rows)
        for mine, other in zip(*results, strict=True):
            if mine.dtype == torch.int32:
                assert torch.equal(mine, other)
        assert torch.equal(*ends)


@pytest.mark.parametrize("function", TAKES)
@pytest.mark.parametrize("first", [DECODE_ROWS, CHUNK_ROWS])
def test_rows_of_one_session_follow_each_other(function: Callable[..., None], first: int) -> None:
    arrays, followed = verdict_buffer(), followed_slots()
    given = launch(4)._replace(
        slots=int32s([0, 1, 0, 0]), counts=int32s([4, 2, 4, 3]), starts=int32s([10, 20, 14, 19])
    )
    put(put_rows_torch, arrays, given, first=first)
    taken = take(function, arrays, followed, 4, first=first)
    # The last one does not begin where the one before it ends.
    assert taken.faults.tolist() == [FAULT_NONE, FAULT_NONE, FAULT_NONE, FAULT_START]
    assert taken.counts.tolist() == [4, 2, 4, 0]
    assert followed.num_rows[[7, 2]].tolist() == [18, 22]
