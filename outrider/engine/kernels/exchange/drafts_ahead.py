# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Transfer of look-ahead drafts, made for possible outcomes of a running round.

While the verifier runs round n, the drafter writes drafts for several possible outcomes of that
round, each with the digest of the prefix that it continues, and then n - 1, the number of the last
round that it has received. When round n ends, the verifier compares the digests with that of each
session's new prefix and copies the matching draft into private memory. The decode rows of the
verdict tell the drafter which of its drafts the next round verifies.

The drafter writes these drafts only after it has received a round, and the verifier reads them
before it publishes the next round, so they are never written while they are read. A drafter that
breaks this rule can only harm its own drafts, because the copies are checked.

Shapes: R rows of a launch (one per session), X session slots of the verifier, F outcomes per
session, K tokens of a chain.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.exchange.buffers import DRAFT_FIELDS, ExchangeBuffer, ExchangeState
from outrider.engine.kernels.exchange.numbers import array_at, load_acquire, store_release
from outrider.engine.kernels.exchange.verdicts import TakenRows
from outrider.engine.kernels.runtime import next_power_of_2

NOT_CHOSEN: Final = -1
"""Marks a session without a look-ahead draft for the outcome of its last round."""
AHEAD_NUMBER: Final = DRAFT_FIELDS.index("ahead_number")
"""Index of `ahead_number` in DRAFT_FIELDS; `ahead_digests` and `ahead_tokens` follow it."""
_NUMBER = tl.constexpr(AHEAD_NUMBER)


class ChosenDrafts(NamedTuple):
    """Look-ahead drafts that fit the actual outcome of each session's last round, in the verifier's
    private memory. The tensors are allocated once, so that CUDA graphs can use them."""

    outcomes: Tensor
    """int32 [X]: index of the actual outcome among the F outcomes for which the drafter drafted;
    NOT_CHOSEN if it is not among them. The session's next round verifies the draft of this
    outcome."""
    tokens: Tensor
    """int32 [X, K]: checked tokens of that draft; -1 for absent nodes."""


def new_chosen_drafts(slots: int, length: int, device: torch.device) -> ChosenDrafts:
    """Return tensors without any draft, allocated once for use in CUDA graphs."""
    with torch.inference_mode(False):
        return ChosenDrafts(
            torch.full((slots,), NOT_CHOSEN, dtype=torch.int32, device=device),
            torch.full((slots, length), -1, dtype=torch.int32, device=device),
        )


def choose_drafts(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    chosen: ChosenDrafts,
    *,
    outcomes: int,
    vocab_size: int,
    padding: int,
) -> None:
    """Choose for each session the look-ahead draft that fits the outcome of the round. The verifier
    calls this at the end of the round, before it publishes the number of the round.

    buffer: the draft buffer, in the verifier's memory, with `outcomes` (F) outcomes per slot.
    slots: int32 [R], session slots. digests: int64 [X], the prefix digest of each session slot,
    including this round's tokens. chosen: receives the drafts of these sessions. A draft ends
    before the first token outside [0, vocab_size). Nothing is chosen for the slot `padding`.
    """
    if slots.is_cuda:
        choose_drafts_triton(
            buffer,
            state,
            slots,
            digests,
            chosen,
            outcomes=outcomes,
            vocab_size=vocab_size,
            padding=padding,
        )
    else:
        choose_drafts_torch(
            buffer, state, slots, digests, chosen, vocab_size=vocab_size, padding=padding
        )


def choose_drafts_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    chosen: ChosenDrafts,
    *,
    vocab_size: int,
    padding: int,
) -> None:
    """Compute `choose_drafts` with PyTorch operators, for CPU tensors only."""
    chosen.outcomes[slots.long()] = NOT_CHOSEN
    if not int(state.words[1]):
        return
    number, own_digests, own_tokens = buffer.bank(0)[AHEAD_NUMBER : AHEAD_NUMBER + 3]
    if int(number[0]) != int(state.words[0]):
        return
    for slot in slots.tolist():
        fits = (own_digests[slot] == digests[slot]).nonzero()[:, 0]
        if slot == padding or not len(fits):
            continue
        tokens = own_tokens[slot, fits[0]].clone()
        sound = ((tokens >= 0) & (tokens < vocab_size)).cumprod(0).bool()
        if bool(sound[0]):
            chosen.outcomes[slot] = fits[0]
            chosen.tokens[slot] = torch.where(sound, tokens, -1)


def choose_drafts_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    digests: Tensor,
    chosen: ChosenDrafts,
    *,
    outcomes: int,
    vocab_size: int,
    padding: int,
) -> None:
    """Compute `choose_drafts` with one Triton kernel, one program per row."""
    length = chosen.tokens.shape[1]
    _choose_drafts[(len(slots),)](
        buffer.addresses,
        state.words,
        slots,
        digests,
        *chosen,
        vocab_size,
        padding,
        OUTCOMES=outcomes,
        BLOCK=next_power_of_2(outcomes),
        LENGTH=length,
        TOKENS=next_power_of_2(length),
        NONE=NOT_CHOSEN,
        num_warps=1,
    )


@triton.jit
def _choose_drafts(
    addresses,
    words,
    slots,
    digests,
    chosen,
    tokens,
    vocab_size,
    padding,
    OUTCOMES: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    NONE: tl.constexpr,
):
    slot = tl.load(slots + tl.program_id(0))
    found = OUTCOMES
    at = tl.arange(0, TOKENS)
    given = tl.full((TOKENS,), -1, tl.int32)
    if (tl.load(words + 1) != 0) & (slot != padding):  # noqa: SIM102 - not `and` on a device
        if load_acquire(array_at(addresses, _NUMBER, tl.int32)) == tl.load(words):
            own_digests = array_at(addresses, _NUMBER + 1, tl.int64)
            own_tokens = array_at(addresses, _NUMBER + 2, tl.int32)
            outcome = tl.arange(0, BLOCK)
            inside = outcome < OUTCOMES
            theirs = tl.load(own_digests + slot * OUTCOMES + outcome, mask=inside, other=0)
            fits = inside & (theirs == tl.load(digests + slot))
            found = tl.min(tl.where(fits, outcome, OUTCOMES), axis=0)
            if found < OUTCOMES:
                place = (slot * OUTCOMES + found).to(tl.int64) * LENGTH
                given = tl.load(own_tokens + place + at, mask=at < LENGTH, other=-1)
    sound = (given >= 0) & (given < vocab_size)
    # The first token that is none ends the chain.
    length = tl.minimum(tl.min(tl.where(sound, LENGTH, at), axis=0), LENGTH)
    is_chosen = (found < OUTCOMES) & (length > 0)
    tl.store(chosen + slot, tl.where(is_chosen, found, NONE))
    if is_chosen:
        kept = tl.where(at < length, given, -1)
        tl.store(tokens + slot * LENGTH + at, kept, mask=at < LENGTH)


def put_outcomes(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    taken: TakenRows,
    digests: Tensor,
    tokens: Tensor,
) -> None:
    """Write look-ahead drafts for possible outcomes of the round that the verifier runs, and then
    the number of the round that the drafter received last.

    taken: the rows of the round that the drafter received last. digests: int64 [R, F], the digest
    of the prefix that ends with each outcome. tokens: int32 [R, F, K], the drafts. Rows without
    tokens get no drafts. If the exchange is closed, nothing is written.
    """
    if tokens.is_cuda:
        put_outcomes_triton(buffer, state, taken, digests, tokens)
    else:
        put_outcomes_torch(buffer, state, taken, digests, tokens)


def put_outcomes_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    taken: TakenRows,
    digests: Tensor,
    tokens: Tensor,
) -> None:
    """Compute `put_outcomes` with PyTorch operators, for CPU tensors only."""
    if not int(state.words[1]):
        return
    number, peer_digests, peer_tokens = buffer.bank(0)[AHEAD_NUMBER : AHEAD_NUMBER + 3]
    for row in (taken.counts > 0).nonzero()[:, 0].tolist():
        slot = int(taken.source_slots[row])
        peer_digests[slot], peer_tokens[slot] = digests[row], tokens[row]
    number[0] = state.words[0]


def put_outcomes_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    taken: TakenRows,
    digests: Tensor,
    tokens: Tensor,
) -> None:
    """Compute `put_outcomes` with two Triton kernels. The first one, with one program per row and
    outcome, writes the drafts; the second one publishes the round number."""
    rows, outcomes, length = tokens.shape
    _put_outcomes[(rows, outcomes)](
        buffer.addresses,
        state.words,
        taken.source_slots,
        taken.counts,
        digests,
        tokens,
        OUTCOMES=outcomes,
        LENGTH=length,
        TOKENS=next_power_of_2(length),
        num_warps=1,
    )
    _publish_outcomes[(1,)](buffer.addresses, state.words, num_warps=1)


@triton.jit
def _put_outcomes(
    addresses,
    words,
    source_slots,
    counts,
    digests,
    tokens,
    OUTCOMES: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0)
    outcome = tl.program_id(1)
    slot = tl.load(source_slots + row)
    if (tl.load(words + 1) != 0) & (tl.load(counts + row) > 0) & (slot >= 0):
        peer_digests = array_at(addresses, _NUMBER + 1, tl.int64)
        peer_tokens = array_at(addresses, _NUMBER + 2, tl.int32)
        source = row * OUTCOMES + outcome
        target = slot * OUTCOMES + outcome
        at = tl.arange(0, TOKENS)
        given = tl.load(tokens + source.to(tl.int64) * LENGTH + at, mask=at < LENGTH)
        tl.store(peer_tokens + target.to(tl.int64) * LENGTH + at, given, mask=at < LENGTH)
        tl.store(peer_digests + target, tl.load(digests + source))


@triton.jit
def _publish_outcomes(addresses, words):
    if tl.load(words + 1) != 0:
        store_release(array_at(addresses, _NUMBER, tl.int32), tl.load(words))
