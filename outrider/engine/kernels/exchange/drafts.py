# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Transfer of draft chains from the drafter to the verifier.

The draft buffer has one draft per session slot, with the digest of the prefix that it continues.
The verifier reads drafts only after `wait_drafts` has succeeded. From then on the drafter does not
write them until the verifier publishes its next round. The verifier copies a draft into private
memory and checks the copy. A draft that fails a check is dropped, and its session decodes without
drafts in the same launch.

Shapes: R rows of a launch (one per session), X session slots of the verifier, K tokens of a chain,
E entries of a distribution.
"""

from __future__ import annotations

import time
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.drafts.distribution_sampling import ChainDistributions
from outrider.engine.kernels.exchange.buffers import ExchangeBuffer, ExchangeState
from outrider.engine.kernels.exchange.drafts_ahead import ChosenDrafts
from outrider.engine.kernels.exchange.numbers import array_at, device_clock
from outrider.engine.kernels.exchange.verdicts import TakenRows
from outrider.engine.kernels.noise import mix64
from outrider.engine.kernels.runtime import next_power_of_2
from outrider.engine.noise import extend_digests
from outrider.spec.digest import TOKEN_OFFSET

NO_TOKEN: Final = -1
_OFFSET = tl.constexpr(TOKEN_OFFSET)


def new_taken_tokens(slots: int, length: int, device: torch.device) -> Tensor:
    """Return a tensor for the draft tokens of each session slot, int32 [X, K], filled with
    NO_TOKEN. It is allocated once, so that CUDA graphs can use it."""
    with torch.inference_mode(False):
        return torch.full((slots, length), NO_TOKEN, dtype=torch.int32, device=device)


def advance_digests(digests: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Extend the prefix digest of each session by its accepted tokens, in place.

    digests: int64 [X], indexed by session slot. slots: int32 [R], distinct except for the padding
    slot. tokens: int32 [R, W], of which the first counts[r] of row r are accepted. counts: int32
    [R].
    """
    function = advance_digests_triton if digests.is_cuda else advance_digests_torch
    function(digests, slots, tokens, counts)


def advance_digests_torch(digests: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Compute `advance_digests` with PyTorch operators."""
    places = slots.long()
    now = digests[places]
    for step in range(tokens.shape[1]):
        longer = extend_digests(now, tokens[:, step].clamp(min=0).long())
        now = torch.where(counts > step, longer, now)
    digests[places] = now


def advance_digests_triton(digests: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Compute `advance_digests` with one Triton kernel, one program per row."""
    rows, width = tokens.shape
    _advance[(rows,)](digests, slots, tokens, tokens.stride(0), counts, WIDTH=width, num_warps=1)


@triton.jit
def _advance(digests, slots, tokens, stride, counts, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    count = tl.load(counts + row)
    digest = tl.load(digests + slot).to(tl.uint64)
    for step in range(WIDTH):
        token = tl.load(tokens + row.to(tl.int64) * stride + step)
        longer = mix64(digest ^ mix64(tl.maximum(token, 0).to(tl.uint64) + _OFFSET))
        digest = tl.where(step < count, longer, digest)
    tl.store(digests + slot, digest.to(tl.int64))


def put_drafts(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    taken: TakenRows,
    tokens: Tensor,
    distributions: ChainDistributions | None,
    *,
    length: int,
    entries: int,
) -> None:
    """Write drafts from the drafter's device into the draft buffer of the verifier, at the
    verifier's session slots.

    taken: the rows from the verifier for which the drafts were made; rows without tokens get no
    draft. tokens: int32 [R, k], where k is at most `length`, the K of the buffer. distributions:
    the distributions from which the tokens were drawn, with target ids, or None if there are none.
    A distribution with more than `entries` (the E of the buffer) entries is left out. If the
    exchange is closed, nothing is written.
    """
    function = put_drafts_triton if tokens.is_cuda else put_drafts_torch
    function(buffer, state, taken, tokens, distributions, length=length, entries=entries)


def put_drafts_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    taken: TakenRows,
    tokens: Tensor,
    distributions: ChainDistributions | None,
    *,
    length: int,
    entries: int,
) -> None:
    """Compute `put_drafts` with PyTorch operators, for CPU tensors only."""
    state.stamps[4] = time.monotonic_ns()
    if not int(state.words[1]):
        return
    peer_digests, peer_tokens, peer_sizes, peer_ids, peer_counts = buffer.bank(0)[1:6]
    for row in (taken.counts > 0).nonzero()[:, 0].tolist():
        slot = int(taken.source_slots[row])
        peer_digests[slot] = taken.digests[row]
        peer_tokens[slot] = NO_TOKEN
        peer_tokens[slot, : tokens.shape[1]] = tokens[row]
        peer_sizes[slot] = 0
        if distributions is None:
            continue
        for step in range(tokens.shape[1]):
            size = int(distributions.sizes[row, step])
            if size > entries:
                continue
            peer_sizes[slot, step] = size
            peer_ids[slot, step, :size] = distributions.entries[0, row, step, :size]
            peer_counts[slot, step, :size] = distributions.entries[1, row, step, :size]


def put_drafts_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    taken: TakenRows,
    tokens: Tensor,
    distributions: ChainDistributions | None,
    *,
    length: int,
    entries: int,
) -> None:
    """Compute `put_drafts` with one Triton kernel, one program per row and token."""
    rows, drafted = tokens.shape
    if not rows:
        return
    sizes = tokens if distributions is None else distributions.sizes
    found = tokens if distributions is None else distributions.entries
    _put_drafts[(rows, length)](
        buffer.addresses,
        state.words,
        state.stamps,
        taken.source_slots,
        taken.counts,
        taken.digests,
        tokens,
        tokens.stride(0),
        sizes,
        found,
        rows * drafted * found.shape[-1],
        found.shape[-1],
        DRAFTED=drafted,
        LENGTH=length,
        ENTRIES=entries,
        HAS_DISTRIBUTIONS=distributions is not None,
        BLOCK=min(1024, next_power_of_2(max(entries, 1))),
        num_warps=4,
    )


@triton.jit
def _put_drafts(
    addresses,
    words,
    stamps,
    source_slots,
    counts,
    digests,
    tokens,
    stride,
    sizes,
    found,
    plane,
    width,
    DRAFTED: tl.constexpr,
    LENGTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    HAS_DISTRIBUTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    step = tl.program_id(1)
    if row + step == 0:
        tl.store(stamps + 4, device_clock())
    slot = tl.load(source_slots + row)
    wanted = (tl.load(words + 1) != 0) & (tl.load(counts + row) > 0) & (slot >= 0)
    if wanted:
        peer_digests = array_at(addresses, 1, tl.int64)
        peer_tokens = array_at(addresses, 2, tl.int32)
        peer_sizes = array_at(addresses, 3, tl.int32)
        peer_ids = array_at(addresses, 4, tl.int32)
        peer_counts = array_at(addresses, 5, tl.int32)
        if step == 0:
            tl.store(peer_digests + slot, tl.load(digests + row))
        token = -1
        size = 0
        if step < DRAFTED:
            token = tl.load(tokens + row.to(tl.int64) * stride + step)
            if HAS_DISTRIBUTIONS:
                size = tl.load(sizes + row * DRAFTED + step)
                # Part of a distribution is not what the token was drawn from.
                size = tl.where(size > ENTRIES, 0, size)
        place = slot * LENGTH + step
        tl.store(peer_tokens + place, token)
        tl.store(peer_sizes + place, size)
        if HAS_DISTRIBUTIONS:
            source = found + (row * DRAFTED + step).to(tl.int64) * width
            target = place.to(tl.int64) * ENTRIES
            for start in range(0, size, BLOCK):
                at = start + tl.arange(0, BLOCK)
                ids = tl.load(source + at, mask=at < size)
                weights = tl.load(source + plane + at, mask=at < size)
                tl.store(peer_ids + target + at, ids, mask=at < size)
                tl.store(peer_counts + target + at, weights, mask=at < size)


def take_drafts(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
) -> None:
    """Copy the draft tokens of sessions from the draft buffer into the verifier's private memory,
    and check the copies.

    slots: int32 [R], session slots. digests: int64 [X], the prefix digest of each session slot; a
    draft with another digest is dropped. tokens: int32 [X, K], receives the draft tokens of each
    session slot, -1 for absent nodes. lengths: int32 [R], receives the number of draft tokens of
    each row. A chain ends before the first token outside [0, vocab_size). chosen: look-ahead
    drafts; a session that has one uses it instead of the draft in the buffer.
    """
    function = take_drafts_triton if slots.is_cuda else take_drafts_torch
    function(
        buffer,
        state,
        slots,
        digests,
        tokens,
        lengths,
        chosen=chosen,
        vocab_size=vocab_size,
    )


def take_drafts_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
) -> None:
    """Compute `take_drafts` with PyTorch operators, for CPU tensors only."""
    is_there = bool(state.words[1]) and bool(state.words[3])
    chain = tokens.shape[1]
    own_digests, own_tokens = buffer.bank(0)[1:3] if is_there else (digests - 1, tokens)
    for row, slot in enumerate(slots.tolist()):
        # Each word is read once: the peer may change it at any time.
        digest, given = own_digests[slot].clone(), own_tokens[slot].clone()
        fits = is_there and int(digest) == int(digests[slot])
        if int(chosen.outcomes[slot]) >= 0:
            given, fits = chosen.tokens[slot], True
        length = 0
        while fits and length < chain and 0 <= int(given[length]) < vocab_size:
            length += 1
        tokens[slot] = NO_TOKEN
        tokens[slot, :length] = given[:length]
        lengths[row] = length
    state.stamps[3] = time.monotonic_ns()


def take_drafts_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
) -> None:
    """Compute `take_drafts` with one Triton kernel, one program per row."""
    rows, chain = slots.shape[0], tokens.shape[1]
    _take_tokens[(rows,)](
        buffer.addresses,
        state.words,
        state.stamps,
        slots,
        digests,
        *chosen,
        tokens,
        lengths,
        vocab_size,
        LENGTH=chain,
        BLOCK=next_power_of_2(chain),
        num_warps=1,
    )


@triton.jit
def _take_tokens(
    addresses,
    words,
    stamps,
    slots,
    digests,
    outcomes,
    chosen_tokens,
    tokens,
    lengths,
    vocab_size,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    at = tl.arange(0, BLOCK)
    given = tl.full((BLOCK,), -1, tl.int32)
    if tl.load(outcomes + slot) >= 0:
        given = tl.load(chosen_tokens + slot * LENGTH + at, mask=at < LENGTH, other=-1)
    elif (tl.load(words + 1) != 0) & (tl.load(words + 3) != 0):
        own_digests = array_at(addresses, 1, tl.int64)
        own_tokens = array_at(addresses, 2, tl.int32)
        if tl.load(own_digests + slot) == tl.load(digests + slot):
            given = tl.load(own_tokens + slot * LENGTH + at, mask=at < LENGTH, other=-1)
    sound = (given >= 0) & (given < vocab_size)
    # The first token that is none ends the chain.
    length = tl.min(tl.where(sound, LENGTH, at), axis=0)
    length = tl.minimum(length, LENGTH)
    tl.store(tokens + slot * LENGTH + at, tl.where(at < length, given, -1), mask=at < LENGTH)
    tl.store(lengths + row, length)
    if row == 0:
        tl.store(stamps + 3, device_clock())
