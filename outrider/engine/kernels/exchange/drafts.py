# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Draft chains and their distributions, from the drafter's device to the verifier's.

A draft lies at its session's slot, with the digest of the prefix that it continues. The verifier
looks at drafts only behind a wait that found them, for until it publishes its next round nobody
writes there. It copies a draft into private memory and checks the copy; a draft that fails a check
is no draft, so that its row decodes plainly in the same launch.

R rows of a launch, X session slots of the verifier, K tokens of a chain, E entries of a
distribution.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.draft_sampling import MAX_COUNT
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
_MAX_COUNT = tl.constexpr(MAX_COUNT)


class TakenDrafts(NamedTuple):
    """Checked drafts in private memory of the verifier's device; static tensors."""

    tokens: Tensor
    """int32 [X, K], by slot; -1: no node."""
    sizes: Tensor
    """int32 [X, K]: entries of each token's distribution; all 0: the session has none."""
    entry_ids: Tensor
    """int32 [X, K, E]."""
    entry_counts: Tensor
    """int32 [X, K, E]."""


def new_taken_drafts(slots: int, length: int, entries: int, device: torch.device) -> TakenDrafts:
    """Static tensors without a draft."""
    with torch.inference_mode(False):

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return TakenDrafts(
            zeros(slots, length) - 1,
            zeros(slots, length),
            zeros(slots, length, entries),
            zeros(slots, length, entries),
        )


def advance_digests(digests: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Extend the prefix digests of sessions by their accepted tokens, in place.

    digests: int64 [X]; slots: int32 [R], different from each other but for padding; tokens: int32
    [R, W]; counts: int32 [R].
    """
    function = advance_digests_triton if digests.is_cuda else advance_digests_torch
    function(digests, slots, tokens, counts)


def advance_digests_torch(digests: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """PyTorch reference of `advance_digests`."""
    places = slots.long()
    now = digests[places]
    for step in range(tokens.shape[1]):
        longer = extend_digests(now, tokens[:, step].clamp(min=0).long())
        now = torch.where(counts > step, longer, now)
    digests[places] = now


def advance_digests_triton(digests: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Triton launch of `advance_digests`: a program a row."""
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
    """Write the drafts of a launch's rows into the peer's buffer, at the peer's slots.

    taken: the rows that they were made for; those without tokens get none. tokens: int32 [R, k], k
    at most `length`, the buffer's K. distributions: those that the tokens were drawn from, with at
    most `entries` (the buffer's E) entries each; None: none. Nothing is written once the exchange
    is closed.
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
    """PyTorch reference of `put_drafts`, for the CPU only."""
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
            size = min(int(distributions.sizes[row, step]), entries)
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
    """Triton launch of `put_drafts`: a program a row and token."""
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
                size = tl.minimum(tl.load(sizes + row * DRAFTED + step), ENTRIES)
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
    taken: TakenDrafts,
    lengths: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
    with_distributions: bool,
) -> None:
    """Copy the drafts of these sessions into `taken`, and check the copies.

    slots: int32 [R]. digests: int64 [X]: of the sessions' prefixes; a draft for another prefix is
    no draft. lengths: int32 [R], gets the number of tokens of each draft; a chain ends before the
    first token that is no id of `vocab_size`. chosen: drafts of outcomes, which are taken before
    those in the buffer; they have no distribution. with_distributions: whether any session asks for
    them: each must have increasing ids below `vocab_size` and weights in [1, MAX_COUNT], else its
    session has none.
    """
    function = take_drafts_triton if slots.is_cuda else take_drafts_torch
    function(
        buffer,
        state,
        slots,
        digests,
        taken,
        lengths,
        chosen=chosen,
        vocab_size=vocab_size,
        with_distributions=with_distributions,
    )


def take_drafts_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    taken: TakenDrafts,
    lengths: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
    with_distributions: bool,
) -> None:
    """PyTorch reference of `take_drafts`, for the CPU only."""
    is_there = bool(state.words[1]) and bool(state.words[3])
    chain, entries = taken.tokens.shape[1], taken.entry_ids.shape[2]
    if is_there:
        own_digests, own_tokens, own_sizes, own_ids, own_counts = buffer.bank(0)[1:6]
    else:
        own_digests, (own_tokens, own_sizes, own_ids, own_counts) = digests - 1, taken
    for row, slot in enumerate(slots.tolist()):
        # Each word is read once: the peer may change it at any time.
        digest, tokens, sizes = (
            part[slot].clone() for part in (own_digests, own_tokens, own_sizes)
        )
        fits = is_there and int(digest) == int(digests[slot])
        if int(chosen.outcomes[slot]) >= 0:
            tokens, sizes, fits = chosen.tokens[slot], torch.zeros_like(sizes), True
        length = 0
        while fits and length < chain and 0 <= int(tokens[length]) < vocab_size:
            length += 1
        taken.tokens[slot] = NO_TOKEN
        taken.tokens[slot, :length] = tokens[:length]
        lengths[row] = length
        if not with_distributions:
            continue
        taken.sizes[slot] = 0
        for step in range(length):
            size = min(max(int(sizes[step]), 0), entries)
            ids, weights = own_ids[slot, step, :size].clone(), own_counts[slot, step, :size].clone()
            sound = (ids >= 0) & (ids < vocab_size) & (weights > 0) & (weights <= MAX_COUNT)
            sound[1:] &= ids[1:] > ids[:-1]
            if bool(sound.all()):
                taken.sizes[slot, step] = size
                taken.entry_ids[slot, step, :size] = ids
                taken.entry_counts[slot, step, :size] = weights
    state.stamps[3] = time.monotonic_ns()


def take_drafts_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    taken: TakenDrafts,
    lengths: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
    with_distributions: bool,
) -> None:
    """Triton launches of `take_drafts`: a program a row, then one a row and distribution."""
    rows, chain = slots.shape[0], taken.tokens.shape[1]
    entries = taken.entry_ids.shape[2]
    _take_tokens[(rows,)](
        buffer.addresses,
        state.words,
        state.stamps,
        slots,
        digests,
        *chosen,
        taken.tokens,
        lengths,
        vocab_size,
        LENGTH=chain,
        BLOCK=next_power_of_2(chain),
        num_warps=1,
    )
    if with_distributions and entries:
        _take_distributions[(rows, chain)](
            buffer.addresses,
            slots,
            chosen.outcomes,
            lengths,
            taken.sizes,
            taken.entry_ids,
            taken.entry_counts,
            vocab_size,
            LENGTH=chain,
            ENTRIES=entries,
            BLOCK=min(1024, next_power_of_2(entries)),
            num_warps=4,
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


@triton.jit
def _take_distributions(
    addresses,
    slots,
    outcomes,
    lengths,
    sizes,
    entry_ids,
    entry_counts,
    vocab_size,
    LENGTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    step = tl.program_id(1)
    slot = tl.load(slots + row)
    place = slot * LENGTH + step
    size = 0
    if (step < tl.load(lengths + row)) & (tl.load(outcomes + slot) < 0):
        own_sizes = array_at(addresses, 3, tl.int32)
        size = tl.minimum(tl.maximum(tl.load(own_sizes + place), 0), ENTRIES)
    own_ids = array_at(addresses, 4, tl.int32)
    own_counts = array_at(addresses, 5, tl.int32)
    base = place.to(tl.int64) * ENTRIES
    bad = 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < size
        ids = tl.load(own_ids + base + at, mask=here, other=0)
        weights = tl.load(own_counts + base + at, mask=here, other=1)
        tl.store(entry_ids + base + at, ids, mask=here)
        tl.store(entry_counts + base + at, weights, mask=here)
        strange = (ids < 0) | (ids >= vocab_size) | (weights < 1) | (weights > _MAX_COUNT)
        bad += tl.sum((strange & here).to(tl.int32), axis=0)
    tl.debug_barrier()
    # The order is that of the copies: what lies in the buffer may change at any time.
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inner = (at > 0) & (at < size)
        ids = tl.load(entry_ids + base + at, mask=inner, other=1)
        before = tl.load(entry_ids + base + at - 1, mask=inner, other=0)
        bad += tl.sum(((ids <= before) & inner).to(tl.int32), axis=0)
    tl.store(sizes + place, tl.where(bad == 0, size, 0))
