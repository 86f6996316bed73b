# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Transfer of draft distributions from the drafter to the verifier, with checks.

The drafter writes the draft tokens, and the distribution from which it drew each of them, into the
verifier's memory. The verifier copies the distributions into private memory and checks the copies,
because the output follows the target's distribution under the rejection rule only if the tokens
were drawn from the given distributions. A distribution that fails a check is treated as missing. A
drafter that sends wrong but consistent data is not detected (decision 0013).

Shapes: R rows of a launch (one per session), X session slots, K tokens of a chain, N = K + 1 nodes
of a row, E entries of a distribution.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.draft_sampling import MAX_COUNT
from outrider.engine.kernels.acceptance.randomized import SparseDistribution
from outrider.engine.kernels.exchange.buffers import DRAFT_FIELDS, ExchangeBuffer, ExchangeState
from outrider.engine.kernels.exchange.drafts_ahead import ChosenDrafts
from outrider.engine.kernels.exchange.numbers import array_at, device_clock
from outrider.engine.kernels.runtime import next_power_of_2

_FIRST: Final = DRAFT_FIELDS.index("sizes")
_SIZES = tl.constexpr(_FIRST)
_IDS = tl.constexpr(DRAFT_FIELDS.index("entry_ids"))
_COUNTS = tl.constexpr(DRAFT_FIELDS.index("entry_counts"))
_MAX_COUNT = tl.constexpr(MAX_COUNT)


class TakenDistributions(NamedTuple):
    """Checked draft distributions in the verifier's private memory, to which the drafter cannot
    write. The tensors are allocated once, so that CUDA graphs can use them."""

    sizes: Tensor
    """int32 [X, K]: number of entries of the distribution of each draft token; 0 if it has no valid
    one."""
    ids: Tensor
    """int32 [X, K, E]: target ids of the entries."""
    counts: Tensor
    """int32 [X, K, E]: counts of the entries."""

    def with_ranges(self, ranges: Tensor) -> SparseDistribution:
        """Return the distributions as the argument of `accept_sampled`. ranges: int32 [R, N, 2],
        see `take_distributions`."""
        return SparseDistribution(self.ids.view(-1), self.counts.view(-1), ranges)


def new_taken_distributions(
    slots: int, length: int, entries: int, device: torch.device
) -> TakenDistributions:
    """Return tensors without any distribution, allocated once for use in CUDA graphs."""
    with torch.inference_mode(False):
        sizes = torch.zeros((slots, length), dtype=torch.int32, device=device)
        ids = torch.zeros((slots, length, entries), dtype=torch.int32, device=device)
        return TakenDistributions(sizes, ids, torch.zeros_like(ids))


def take_distributions(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    taken: TakenDistributions,
    ranges: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
) -> None:
    """Copy the distributions of the drafts that `take_drafts` has copied into private memory, and
    check the copies.

    slots: int32 [R], session slots. tokens: int32 [X, K], and lengths: int32 [R], the drafts from
    `take_drafts`. taken: receives the distributions. ranges: int32 [R, N, 2], receives for each
    node the range of entries in `taken` from which its child was drawn.

    In a valid distribution the ids increase, are below `vocab_size` and include the draft token,
    and the counts are in [1, MAX_COUNT]. If the distribution of one token of a session is invalid,
    or if the session uses a look-ahead draft (`chosen`), all its ranges are empty.
    """
    function = take_distributions_triton if slots.is_cuda else take_distributions_torch
    function(
        buffer,
        state,
        slots,
        tokens,
        lengths,
        taken,
        ranges,
        chosen=chosen,
        vocab_size=vocab_size,
    )


def take_distributions_torch(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    taken: TakenDistributions,
    ranges: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
) -> None:
    """Compute `take_distributions` with PyTorch operators, for CPU tensors only."""
    _, length, entries = taken.ids.shape
    ranges.zero_()
    for row, slot in enumerate(slots.tolist()):
        taken.sizes[slot] = 0
        count = int(lengths[row])
        if not count or int(chosen.outcomes[slot]) >= 0:
            continue
        peer_sizes, peer_ids, peer_counts = buffer.bank(0)[_FIRST : _FIRST + 3]
        for step in range(count):
            size = int(peer_sizes[slot, step])
            if not 0 < size <= entries:
                continue
            # Each word is read once: the peer may change it at any time.
            ids = peer_ids[slot, step, :size].clone()
            counts = peer_counts[slot, step, :size].clone()
            sound = (ids >= 0) & (ids < vocab_size) & (counts > 0) & (counts <= MAX_COUNT)
            sound[1:] &= ids[1:] > ids[:-1]
            if bool(sound.all()) and bool((ids == tokens[slot, step]).any()):
                taken.sizes[slot, step] = size
                taken.ids[slot, step, :size], taken.counts[slot, step, :size] = ids, counts
        sizes = taken.sizes[slot, :count]
        if bool((sizes > 0).all()):
            begins = (slot * length + torch.arange(count)) * entries
            ranges[row, :count, 0], ranges[row, :count, 1] = begins, begins + sizes
    state.stamps[3] = time.monotonic_ns()


def take_distributions_triton(
    buffer: ExchangeBuffer,
    state: ExchangeState,
    slots: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    taken: TakenDistributions,
    ranges: Tensor,
    *,
    chosen: ChosenDrafts,
    vocab_size: int,
) -> None:
    """Compute `take_distributions` with two Triton kernels. The first one, with one program per row
    and token, copies and checks; the second one, with one program per row, writes the ranges."""
    rows, (_, length, entries) = len(slots), taken.ids.shape
    _take_distributions[(rows, length)](
        buffer.addresses,
        slots,
        chosen.outcomes,
        tokens,
        lengths,
        *taken,
        vocab_size,
        LENGTH=length,
        ENTRIES=entries,
        BLOCK=min(1024, next_power_of_2(entries)),
        num_warps=4,
    )
    _write_ranges[(rows,)](
        state.stamps,
        slots,
        lengths,
        taken.sizes,
        ranges,
        LENGTH=length,
        ENTRIES=entries,
        BLOCK=next_power_of_2(length + 1),
        num_warps=1,
    )


@triton.jit
def _take_distributions(
    addresses,
    slots,
    outcomes,
    tokens,
    lengths,
    sizes,
    own_ids,
    own_counts,
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
        size = tl.load(array_at(addresses, _SIZES, tl.int32) + place)
        size = tl.where((size > 0) & (size <= ENTRIES), size, 0)
    peer_ids = array_at(addresses, _IDS, tl.int32)
    peer_counts = array_at(addresses, _COUNTS, tl.int32)
    token = tl.load(tokens + place)
    base = place.to(tl.int64) * ENTRIES
    bad = 0
    found = 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < size
        ids = tl.load(peer_ids + base + at, mask=here, other=-1)
        counts = tl.load(peer_counts + base + at, mask=here, other=1)
        tl.store(own_ids + base + at, ids, mask=here)
        tl.store(own_counts + base + at, counts, mask=here)
        strange = (ids < 0) | (ids >= vocab_size) | (counts < 1) | (counts > _MAX_COUNT)
        bad += tl.sum((strange & here).to(tl.int32), axis=0)
        found += tl.sum((here & (ids == token)).to(tl.int32), axis=0)
    tl.debug_barrier()
    # The order is that of the copies: what lies in the buffer may change at any time.
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inner = (at > 0) & (at < size)
        ids = tl.load(own_ids + base + at, mask=inner, other=1)
        before = tl.load(own_ids + base + at - 1, mask=inner, other=0)
        bad += tl.sum(((ids <= before) & inner).to(tl.int32), axis=0)
    tl.store(sizes + place, tl.where((bad == 0) & (found > 0), size, 0))


@triton.jit
def _write_ranges(
    stamps,
    slots,
    lengths,
    sizes,
    ranges,
    LENGTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    length = tl.load(lengths + row)
    at = tl.arange(0, BLOCK)
    drafted = at < length
    size = tl.load(sizes + slot * LENGTH + at, mask=drafted, other=0)
    missing = tl.sum((drafted & (size == 0)).to(tl.int32), axis=0)
    kept = drafted & (missing == 0)
    begin = tl.where(kept, (slot * LENGTH + at) * ENTRIES, 0)
    target = ranges + (row * (LENGTH + 1) + at) * 2
    tl.store(target, begin, mask=at <= LENGTH)
    tl.store(target + 1, tl.where(kept, begin + size, 0), mask=at <= LENGTH)
    if row == 0:
        tl.store(stamps + 3, device_clock())
