# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Transfer of the accepted tokens and features of a round from the verifier to the drafter.

A row has the new tokens of one session in one round, and the features of these tokens. It is either
a decode row or a prefill chunk. The drafter copies the rows of a round into private memory and
checks the copies, because the content of an exchange buffer may change at any time.

Shapes: R rows of a launch, W tokens of a row, H width of a feature, X session slots of the
verifier, Y session slots of the drafter.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.exchange.buffers import (
    DECODE_ROWS,
    VERDICT_FIELDS,
    ExchangeBuffer,
    ExchangeState,
)
from outrider.engine.kernels.exchange.numbers import device_clock
from outrider.engine.kernels.runtime import next_power_of_2

NO_SLOT: Final = -1
"""Session slot of an absent row."""
FAULT_NONE: Final = 0
FAULT_ABSENT: Final = 1
"""The row is absent, or the exchange is closed."""
FAULT_SLOT: Final = 2
"""The row belongs to a session for which the drafter does not draft."""
FAULT_COUNT: Final = 3
"""The row's number of tokens is negative or too large."""
FAULT_START: Final = 4
"""The first token of the row does not follow the last token that the drafter has of the session."""
FAULT_ROOM: Final = 5
"""Too little KV is reserved for the session to add the row."""
FAULT_TOKEN: Final = 6
"""The row has a token outside the vocabulary."""
_NONE = tl.constexpr(FAULT_NONE)
_ABSENT = tl.constexpr(FAULT_ABSENT)
_SLOT = tl.constexpr(FAULT_SLOT)
_COUNT = tl.constexpr(FAULT_COUNT)
_START = tl.constexpr(FAULT_START)
_ROOM = tl.constexpr(FAULT_ROOM)
_TOKEN = tl.constexpr(FAULT_TOKEN)
OUTCOMES: Final = VERDICT_FIELDS.index("outcomes")
"""Index of the outcomes of decode rows in VERDICT_FIELDS."""
_OUTCOMES = tl.constexpr(OUTCOMES)
_BLOCK: Final = 2048
"""Number of elements of a feature that one program copies at a time."""


class FollowedSlots(NamedTuple):
    """State of the sessions for which a drafter drafts, on the drafter's device."""

    slot_of: Tensor
    """int32 [X]: the drafter's slot for the session in each slot of the verifier; NO_SLOT if the
    drafter does not draft for it."""
    num_rows: Tensor
    """int32 [Y]: number of tokens of the session whose KV the drafter has."""
    max_rows: Tensor
    """int32 [Y]: number of tokens for which KV is reserved, including draft tokens."""


class TakenRows(NamedTuple):
    """Rows that the drafter has received and checked, in private memory of its device. A row has
    the new tokens of one session. The tensors are allocated once, so that CUDA graphs can use
    them."""

    source_slots: Tensor
    """int32 [R]: the session's slot on the verifier; NO_SLOT for rows with a fault."""
    slots: Tensor
    """int32 [R]: the session's slot on the drafter; the padding slot for rows with a fault."""
    counts: Tensor
    """int32 [R]: number of tokens; 0 for rows with a fault."""
    starts: Tensor
    """int32 [R]: draft position of the first token; 0 for rows with a fault."""
    digests: Tensor
    """int64 [R]: digest of the session's prefix that ends with the last token."""
    tokens: Tensor
    """int32 [R, W]: the row's tokens, padded with -1."""
    features: Tensor
    """[R, W, H]: features of the tokens; undefined after the row's last token."""
    faults: Tensor
    """int32 [R]: one of the FAULT_* constants; FAULT_NONE if all checks passed."""
    outcomes: Tensor
    """int32 [R]: index of the look-ahead draft that fits the outcome of the round and that the
    verifier verifies next; negative if there is none, and for prefill chunks. Not checked."""


def new_taken_rows(
    rows: int, width: int, feature_size: int, dtype: torch.dtype, device: torch.device
) -> TakenRows:
    """Return tensors for the rows of a launch, allocated once for use in CUDA graphs. width: W.
    feature_size: H. dtype: that of the features."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    with torch.inference_mode(False):
        return TakenRows(
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows),
            torch.zeros(rows, dtype=torch.int64, device=device),
            zeros(rows, width),
            torch.zeros((rows, width, feature_size), dtype=dtype, device=device),
            zeros(rows),
            zeros(rows) - 1,
        )


def put_rows(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    *,
    first: int,
    slots: Tensor,
    counts: Tensor,
    starts: Tensor,
    digests: Tensor,
    tokens: Tensor,
    features: Tensor,
    outcomes: Tensor | None,
    capacity: int,
    width: int,
    padding: int,
) -> None:
    """Write the decode rows or the prefill chunks of a round from the verifier into the verdict
    buffer of the drafter, and mark the other rows of the buffer as absent.

    first: DECODE_ROWS or CHUNK_ROWS. slots, counts, starts: int32 [R], where R is at most
    `capacity`, see VERDICT_FIELDS. digests: int64 [X], indexed by slot. tokens: int32 [R, w], and
    features: [R, w, H], where w is at most `width`, the W of the buffer. outcomes: int32 [X], for
    decode rows; see `ChosenDrafts`. Rows with the slot `padding` are absent. The rows are written
    to the bank of the next round, whose number is published later. If the exchange is closed,
    nothing is written.
    """
    function = put_rows_triton if slots.is_cuda else put_rows_torch
    function(
        buffer,
        state,
        first=first,
        slots=slots,
        counts=counts,
        starts=starts,
        digests=digests,
        tokens=tokens,
        features=features,
        outcomes=outcomes,
        capacity=capacity,
        width=width,
        padding=padding,
    )


def put_rows_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    *,
    first: int,
    slots: Tensor,
    counts: Tensor,
    starts: Tensor,
    digests: Tensor,
    tokens: Tensor,
    features: Tensor,
    outcomes: Tensor | None,
    capacity: int,
    width: int,
    padding: int,
) -> None:
    """Compute `put_rows` with PyTorch operators, for CPU tensors only."""
    if not int(state.words[1]):
        return
    bank = buffer.bank(int(state.words[0]) + 1)
    peer_slots, peer_counts, peer_starts, peer_digests, peer_tokens, peer_features = bank[
        first : first + 6
    ]
    rows, given = tokens.shape
    peer_slots[:capacity] = NO_SLOT
    for row in range(rows):
        count = min(max(int(counts[row]), 0), given)
        if int(slots[row]) == padding:
            continue
        peer_counts[row], peer_starts[row] = count, starts[row]
        peer_digests[row] = digests[int(slots[row])]
        peer_tokens[row, :count] = tokens[row, :count]
        peer_features[row, :count] = features[row, :count]
        if outcomes is not None:
            bank[OUTCOMES][row] = outcomes[int(slots[row])]
        peer_slots[row] = slots[row]


def put_rows_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    *,
    first: int,
    slots: Tensor,
    counts: Tensor,
    starts: Tensor,
    digests: Tensor,
    tokens: Tensor,
    features: Tensor,
    outcomes: Tensor | None,
    capacity: int,
    width: int,
    padding: int,
) -> None:
    """Compute `put_rows` with one Triton kernel, one program per row and token."""
    rows, given, size = features.shape
    _put_rows[(capacity, given)](
        buffer.addresses,
        buffer.bank_bytes,
        state.words,
        slots,
        counts,
        starts,
        digests,
        tokens,
        tokens.stride(0),
        features,
        features.stride(0),
        features.stride(1),
        digests if outcomes is None else outcomes,
        rows,
        given,
        width,
        padding,
        FIRST=first,
        DEPTH=buffer.depth,
        SIZE=size,
        BLOCK=min(_BLOCK, next_power_of_2(size)),
        HAS_OUTCOMES=outcomes is not None,
        NO_ROW=NO_SLOT,
        num_warps=4,
    )


@triton.jit
def bank_offset(number, bank_bytes, DEPTH: tl.constexpr):
    """Return the offset of a round's bank from the first bank, in bytes. The round number may be
    negative, because it wraps around."""
    bank = number % DEPTH
    bank = tl.where(bank < 0, bank + DEPTH, bank)
    return bank.to(tl.int64) * bank_bytes


@triton.jit
def bank_array(addresses, place: tl.constexpr, offset, dtype: tl.constexpr):
    """Return a pointer to the array of a buffer whose address in the first bank is
    addresses[place], in the bank at `offset` bytes from the first one."""
    return (tl.load(addresses + place) + offset).to(tl.pointer_type(dtype))


@triton.jit
def _put_rows(
    addresses,
    bank_bytes,
    words,
    slots,
    counts,
    starts,
    digests,
    tokens,
    tokens_stride,
    features,
    row_stride,
    token_stride,
    outcomes,
    rows,
    given,
    width,
    padding,
    FIRST: tl.constexpr,
    DEPTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_OUTCOMES: tl.constexpr,
    NO_ROW: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1)
    if tl.load(words + 1) != 0:
        bank = bank_offset(tl.load(words) + 1, bank_bytes, DEPTH)
        peer_slots = bank_array(addresses, FIRST, bank, tl.int32)
        peer_counts = bank_array(addresses, FIRST + 1, bank, tl.int32)
        peer_starts = bank_array(addresses, FIRST + 2, bank, tl.int32)
        peer_digests = bank_array(addresses, FIRST + 3, bank, tl.int64)
        peer_tokens = bank_array(addresses, FIRST + 4, bank, tl.int32)
        peer_features = bank_array(addresses, FIRST + 5, bank, features.dtype.element_ty)
        slot = NO_ROW
        count = 0
        if row < rows:
            slot = tl.load(slots + row)
            count = tl.minimum(tl.maximum(tl.load(counts + row), 0), given)
            if slot == padding:
                slot = NO_ROW
                count = 0
        if token == 0:
            tl.store(peer_slots + row, slot)
            if slot >= 0:
                tl.store(peer_counts + row, count)
                tl.store(peer_starts + row, tl.load(starts + row))
                tl.store(peer_digests + row, tl.load(digests + slot))
                if HAS_OUTCOMES:
                    peer_outcomes = bank_array(addresses, _OUTCOMES, bank, tl.int32)
                    tl.store(peer_outcomes + row, tl.load(outcomes + slot))
        if token < count:
            tl.store(
                peer_tokens + row * width + token,
                tl.load(tokens + row.to(tl.int64) * tokens_stride + token),
            )
            source = features + row.to(tl.int64) * row_stride + token * token_stride
            target = peer_features + (row * width + token).to(tl.int64) * SIZE
            for start in range(0, SIZE, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(target + at, tl.load(source + at, mask=at < SIZE), mask=at < SIZE)


def take_rows(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    followed: FollowedSlots,
    taken: TakenRows,
    *,
    first: int,
    padding: int,
    vocab_size: int,
    rows_ahead: int,
) -> None:
    """Copy the first R rows of the round that `wait_round` has received into `taken`, check the
    copies, and add their tokens to `followed.num_rows`.

    buffer: the verdict buffer, in the drafter's memory. first: DECODE_ROWS or CHUNK_ROWS.
    rows_ahead: number of draft tokens per session for which KV must be reserved in addition. A row
    that fails a check gets the padding slot, no tokens, and a FAULT_* constant in `faults`.
    """
    function = take_rows_triton if taken.slots.is_cuda else take_rows_torch
    function(
        buffer,
        state,
        followed,
        taken,
        first=first,
        padding=padding,
        vocab_size=vocab_size,
        rows_ahead=rows_ahead,
    )


def take_rows_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    followed: FollowedSlots,
    taken: TakenRows,
    *,
    first: int,
    padding: int,
    vocab_size: int,
    rows_ahead: int,
) -> None:
    """Compute `take_rows` with PyTorch operators, for CPU tensors only."""
    if not int(state.words[1]):
        # There may be no buffer any more.
        taken.source_slots.fill_(NO_SLOT)
        taken.slots.fill_(padding)
        taken.tokens.fill_(-1)
        taken.outcomes.fill_(-1)
        taken.faults.fill_(FAULT_ABSENT)
        for array in (taken.counts, taken.starts, taken.digests):
            array.zero_()
        return
    bank = buffer.bank(int(state.words[0]))
    own_slots, own_counts, own_starts, own_digests, own_tokens, own_features = bank[
        first : first + 6
    ]
    rows, width = taken.tokens.shape
    known = followed.num_rows.clone()
    for row in range(rows):
        # Each word is read once: the peer may change it at any time.
        source, count, start = int(own_slots[row]), int(own_counts[row]), int(own_starts[row])
        digest, tokens = int(own_digests[row]), own_tokens[row].clone()
        before = own_counts[:row][own_slots[:row] == source].clamp(0, width)
        fault, slot = FAULT_NONE, padding
        if source == NO_SLOT:
            fault = FAULT_ABSENT
        elif not 0 <= source < len(followed.slot_of) or int(followed.slot_of[source]) < 0:
            fault = FAULT_SLOT
        else:
            slot = int(followed.slot_of[source])
            if not 0 <= count <= width:
                fault = FAULT_COUNT
            elif start != int(known[slot]) + int(before.sum()):
                fault = FAULT_START
            elif start + count + rows_ahead > int(followed.max_rows[slot]):
                fault = FAULT_ROOM
            elif bool(((tokens[:count] < 0) | (tokens[:count] >= vocab_size)).any()):
                fault = FAULT_TOKEN
        if fault:
            source, slot, count, start, digest = NO_SLOT, padding, 0, 0, 0
        elif count:
            followed.num_rows[slot] = max(int(followed.num_rows[slot]), start + count)
        taken.source_slots[row], taken.slots[row] = source, slot
        taken.counts[row], taken.starts[row], taken.faults[row] = count, start, fault
        taken.digests[row] = digest
        taken.outcomes[row] = -1 if fault or first != DECODE_ROWS else bank[OUTCOMES][row]
        taken.tokens[row] = -1
        taken.tokens[row, :count] = tokens[:count]
        taken.features[row, :count] = own_features[row, :count]
    state.stamps[3] = time.monotonic_ns()


def take_rows_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    followed: FollowedSlots,
    taken: TakenRows,
    *,
    first: int,
    padding: int,
    vocab_size: int,
    rows_ahead: int,
) -> None:
    """Compute `take_rows` with two Triton kernels. The first one, with one program per row, checks
    the rows. The second one, with one program per row and token, copies the features and updates
    `num_rows`."""
    rows, width, size = taken.features.shape
    if not rows:
        return
    _check_rows[(rows,)](
        buffer.addresses,
        buffer.bank_bytes,
        state.words,
        *followed,
        len(followed.slot_of),
        taken.source_slots,
        taken.slots,
        taken.counts,
        taken.starts,
        taken.digests,
        taken.tokens,
        taken.faults,
        taken.outcomes,
        padding,
        vocab_size,
        rows_ahead,
        FIRST=first,
        DEPTH=buffer.depth,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ROWS=next_power_of_2(rows),
        HAS_OUTCOMES=first == DECODE_ROWS,
        num_warps=1,
    )
    _copy_features[(rows, width)](
        buffer.addresses,
        buffer.bank_bytes,
        state.words,
        state.stamps,
        followed.num_rows,
        taken.slots,
        taken.counts,
        taken.starts,
        taken.features,
        FIRST=first,
        DEPTH=buffer.depth,
        WIDTH=width,
        SIZE=size,
        BLOCK=min(_BLOCK, next_power_of_2(size)),
        num_warps=4,
    )


@triton.jit
def _check_rows(
    addresses,
    bank_bytes,
    words,
    slot_of,
    num_rows,
    max_rows,
    num_slots,
    source_slots,
    slots,
    counts,
    starts,
    digests,
    tokens,
    faults,
    outcomes,
    padding,
    vocab_size,
    rows_ahead,
    FIRST: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_OUTCOMES: tl.constexpr,
):
    row = tl.program_id(0)
    is_open = tl.load(words + 1) != 0
    # A closed exchange may have no buffer any more.
    at = tl.arange(0, BLOCK)
    source = -1
    count = 0
    start = 0
    outcome = -1
    before = 0
    digest = tl.full((), 0, tl.int64)
    given = tl.zeros((BLOCK,), tl.int32)
    if is_open:
        bank = bank_offset(tl.load(words), bank_bytes, DEPTH)
        source = tl.load(bank_array(addresses, FIRST, bank, tl.int32) + row)
        count = tl.load(bank_array(addresses, FIRST + 1, bank, tl.int32) + row)
        start = tl.load(bank_array(addresses, FIRST + 2, bank, tl.int32) + row)
        digest = tl.load(bank_array(addresses, FIRST + 3, bank, tl.int64) + row)
        # Rows of one session follow each other: their programs run at the same time.
        other = tl.arange(0, ROWS)
        own_slots = bank_array(addresses, FIRST, bank, tl.int32)
        own_counts = bank_array(addresses, FIRST + 1, bank, tl.int32)
        others = tl.load(own_slots + other, mask=other < row, other=-1)
        lengths = tl.load(own_counts + other, mask=other < row, other=0)
        lengths = tl.minimum(tl.maximum(lengths, 0), WIDTH)
        before = tl.sum(tl.where(others == source, lengths, 0), axis=0)
        if HAS_OUTCOMES:
            outcome = tl.load(bank_array(addresses, _OUTCOMES, bank, tl.int32) + row)
        own_tokens = bank_array(addresses, FIRST + 4, bank, tl.int32)
        given = tl.load(own_tokens + row * WIDTH + at, mask=at < WIDTH, other=0)
    is_there = is_open & (source != -1)
    is_named = (source >= 0) & (source < num_slots)
    slot = tl.load(slot_of + tl.where(is_named, source, 0))
    is_named = is_named & (slot >= 0)
    safe = tl.where(is_named, slot, padding)
    known = tl.load(num_rows + safe)
    room = tl.load(max_rows + safe)
    has_count = (count >= 0) & (count <= WIDTH)
    strange = ((given < 0) | (given >= vocab_size)) & (at < count) & (at < WIDTH)
    is_strange = tl.sum(strange.to(tl.int32), axis=0) > 0
    # Differences, for a sum of hostile numbers may wrap around.
    has_room = count + rows_ahead <= room - start
    fault = tl.where(is_strange, _TOKEN, _NONE)
    fault = tl.where(has_room, fault, _ROOM)
    fault = tl.where(start == known + before, fault, _START)
    fault = tl.where(has_count, fault, _COUNT)
    fault = tl.where(is_named, fault, _SLOT)
    fault = tl.where(is_there, fault, _ABSENT)
    good = fault == _NONE
    count = tl.where(good, count, 0)
    start = tl.where(good, start, 0)
    tl.store(source_slots + row, tl.where(good, source, -1))
    tl.store(slots + row, tl.where(good, slot, padding))
    tl.store(counts + row, count)
    tl.store(starts + row, start)
    tl.store(digests + row, tl.where(good, digest, 0))
    tl.store(faults + row, fault)
    tl.store(outcomes + row, tl.where(good, outcome, -1))
    tl.store(tokens + row * WIDTH + at, tl.where(at < count, given, -1), mask=at < WIDTH)


@triton.jit
def _copy_features(
    addresses,
    bank_bytes,
    words,
    stamps,
    num_rows,
    slots,
    counts,
    starts,
    features,
    FIRST: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1)
    if token < tl.load(counts + row):
        bank = bank_offset(tl.load(words), bank_bytes, DEPTH)
        own_features = bank_array(addresses, FIRST + 5, bank, features.dtype.element_ty)
        base = (row * WIDTH + token).to(tl.int64) * SIZE
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(own_features + base + at, mask=at < SIZE)
            tl.store(features + base + at, value, mask=at < SIZE)
        if token == 0:
            # Behind all checks, which compare with what was there before this launch.
            end = tl.load(starts + row) + tl.load(counts + row)
            tl.atomic_max(num_rows + tl.load(slots + row), end)
    if row + token == 0:
        tl.store(stamps + 3, device_clock())
