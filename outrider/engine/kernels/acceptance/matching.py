# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Token-matching acceptance (greedy, coupled) on the device, and the commit of a round.

Acceptance starts at the root. At a node where the target chose the token y, the child whose token
is y is accepted and becomes the next node. If there is no such child, y is emitted as the last
token of the round. `outrider.engine.acceptance` has the same rules on the host. Rules with random
acceptance are in `outrider.engine.kernels.acceptance.randomized`.

Shape suffixes: B sessions of the batch bucket, N nodes per session including the root, M = B * N
rows (one per node), X session slots (the last one is the padding slot).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.noise import noise_bits, noise_key, row_keys, uniform
from outrider.engine.kernels.runtime import next_power_of_2
from outrider.engine.kernels.session_tensors import SamplingState, SequenceState
from outrider.engine.noise import noise_bits as noise_words
from outrider.engine.noise import uniform_from_bits
from outrider.errors import InvalidRequestError
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream

PERIOD_UNIT = 1 << 16
"""Number of units of a simulated period for one token."""
_PERIOD_UNIT = tl.constexpr(PERIOD_UNIT)
_ACCEPT = tl.constexpr(int(NoiseStream.ACCEPT))
_SHARED_DRAW_ID = tl.constexpr(SHARED_DRAW_ID)


RESAMPLED = 1
"""Flag: the last accepted node had children and all of them were rejected, so the final token is
not a bonus token."""
TARGET_ONLY_FALLBACK = 2
"""Flag: the target-only rule replaced the rejection rule because the draft distribution was
missing."""
INVALID_OUTPUT = 4
"""Flag: the row of the last accepted node has no finite logit. The final token is 0, a
placeholder."""
UNDRAFTED = 8
"""Flag: the drafter on another device had no draft for the session, so it decoded without drafts.
The engine's round sets this flag, not the acceptance functions."""
_RESAMPLED = tl.constexpr(RESAMPLED)
_INVALID_OUTPUT = tl.constexpr(INVALID_OUTPUT)


class DeviceAcceptance(NamedTuple):
    """Acceptance result of a round, one row per session."""

    counts: Tensor
    """int32 [B]: number of accepted nodes + 1, which is also the number of emitted tokens."""
    rows: Tensor
    """int32 [B, N]: 0 (the root), then the rows of the accepted nodes in ascending order. The
    entries from index counts[b] on hold their own index."""
    tokens: Tensor
    """int32 [B, N]: tokens of the accepted nodes, then the final token, padded with -1."""
    flags: Tensor
    """int32 [B]: a sum of RESAMPLED, TARGET_ONLY_FALLBACK and INVALID_OUTPUT, or 0."""


def accept_matching(
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    *,
    num_nodes: int,
    simulate: Tensor | int | None = None,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
) -> DeviceAcceptance:
    """Apply the greedy or coupled acceptance rule to the drafts of each session.

    chosen: int32 [M], the target's token at each row (`choose_tokens`, side "target"); -1 if the
    row has no finite logit. tokens: int32 [M], the draft token of each row; -1 for absent nodes.
    The entry of the root is ignored. parents: int32 [B, N - 1], the parent of each node (-1 for the
    root, -2 for absent nodes), parents before children; None for chains. If several children have
    the chosen token, the first one is accepted.

    simulate: only for chains, for benchmarks with random weights; tokens do not matter then.
    float32 [N - 1]: if its parent is accepted, the node of depth i + 1 is accepted with probability
    simulate[i]. The random draw is uniform(seed, ACCEPT, position of the token, SHARED_DRAW_ID).
    An integer L: a schedule by position. Every L / PERIOD_UNIT tokens one token ends a round, and
    all others are accepted, so that rounds emit the next smaller or the next larger number of
    tokens and their running mean stays within one token in all. The token at position p ends a
    round if a multiple of L lies in (p * PERIOD_UNIT + o, (p + 1) * PERIOD_UNIT + o]. The offset o
    of a session is floor(L * uniform(seed, ACCEPT, 0, SHARED_DRAW_ID)). state, slots (int32 [B])
    and positions (int32 [M], the position of the token that follows each row) are only used with
    `simulate`. Raises InvalidRequestError if `simulate` is given for trees.
    """
    if simulate is not None and parents is not None:
        raise InvalidRequestError("only chains can be simulated", reason="KERNEL_SHAPES")
    function = accept_matching_triton if chosen.is_cuda else accept_matching_torch
    return function(
        chosen,
        tokens,
        parents,
        num_nodes=num_nodes,
        simulate=simulate,
        state=state,
        slots=slots,
        positions=positions,
    )


def new_acceptance(batch: int, num_nodes: int, device: torch.device) -> DeviceAcceptance:
    """Return a `DeviceAcceptance` of uninitialised tensors."""
    one, many = (batch,), (batch, num_nodes)
    shapes = (one, many, many, one)
    return DeviceAcceptance(*(torch.empty(s, dtype=torch.int32, device=device) for s in shapes))


def chain_parents(batch: int, num_nodes: int, device: torch.device) -> Tensor:
    """Return the `parents` tensor of B equal chains, int32 [B, N - 1]: the parent of each draft
    node is the node before it, and -1 (the root) for the first one."""
    chain = torch.arange(-1, num_nodes - 2, dtype=torch.int32, device=device)
    return chain.expand(batch, num_nodes - 1)


def accept_matching_torch(
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    *,
    num_nodes: int,
    simulate: Tensor | int | None = None,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
) -> DeviceAcceptance:
    """Compute `accept_matching` with PyTorch operators."""
    chosen_BN, tokens_BN = chosen.view(-1, num_nodes), tokens.view(-1, num_nodes)
    batch = len(chosen_BN)
    parents_BN = chain_parents(batch, num_nodes, chosen.device) if parents is None else parents
    simulated_BN = None
    if simulate is not None:
        simulated_BN = _simulated_nodes(simulate, state, slots, positions.view(batch, -1))
    node = torch.zeros(batch, dtype=torch.int64, device=chosen.device)
    walk = ReferenceWalk(batch, num_nodes, chosen.device)
    for row in range(1, num_nodes):
        drafted = tokens_BN[:, row]
        below = (parents_BN[:, row - 1] == node - 1) & (drafted >= 0)
        if simulated_BN is None:
            stands = below & (drafted == chosen_BN.gather(1, node[:, None])[:, 0])
        else:
            stands = below & simulated_BN[:, row - 1]
        node = walk.step(row, node, drafted, below, stands)
    return walk.finish(chosen_BN.gather(1, node[:, None])[:, 0])


def _simulated_nodes(
    simulate: Tensor | int, state: SamplingState, slots: Tensor, positions_BN: Tensor
) -> Tensor:
    """Return whether the draft token at each position is accepted if the one before it is: bool
    [B, N], or [B, N - 1] for rates. See `accept_matching`."""
    stream_keys_B1 = state.stream_keys[slots.long(), NoiseStream.ACCEPT - 1][:, None]
    if isinstance(simulate, Tensor):
        coins_BN = _shared_draws(stream_keys_B1, positions_BN)
        return coins_BN[:, : len(simulate)] < simulate
    draws_B1 = _shared_draws(stream_keys_B1, torch.zeros_like(positions_BN[:, :1]))
    starts_BN = positions_BN.to(torch.int64) * PERIOD_UNIT + (draws_B1 * simulate).to(torch.int64)
    return starts_BN // simulate == (starts_BN + PERIOD_UNIT) // simulate


def _shared_draws(stream_keys: Tensor, positions: Tensor) -> Tensor:
    """Return uniform(seed, stream, position, SHARED_DRAW_ID) of each position, float64."""
    keys = row_keys(stream_keys, positions)
    return uniform_from_bits(noise_words(keys, torch.full_like(keys, SHARED_DRAW_ID)))


class ReferenceWalk:
    """Records the accepted paths of all sessions for the PyTorch reference implementations, which
    visit the nodes of the draft trees one at a time, in row order."""

    def __init__(self, batch: int, num_nodes: int, device: torch.device) -> None:
        self.counts = torch.ones(batch, dtype=torch.int64, device=device)
        places = torch.arange(num_nodes, dtype=torch.int32, device=device)
        self.rows = places.repeat(batch, 1)
        self.tokens = torch.full_like(self.rows, -1)
        self.rejected = torch.zeros(batch, dtype=torch.bool, device=device)
        self.fallback = torch.zeros_like(self.rejected)
        """bool [B]: whether the session's draft distribution was missing. The caller sets it."""

    def step(
        self, row: int, node: Tensor, drafted: Tensor, below: Tensor, stands: Tensor
    ) -> Tensor:
        """Accept node `row` in the sessions for which `stands` is True. Return the last accepted
        node of each session, int64 [B].

        All tensors are [B]. node: the last accepted node of each session before this call. drafted:
        the draft token at `row`. below: whether `row` is a child of `node`. stands: whether `row`
        is a child of `node` and its token is accepted.
        """
        at = self.counts[:, None]
        self.rows.scatter_(1, at, torch.where(stands, row, self.rows.gather(1, at)[:, 0])[:, None])
        self._put(stands, drafted)
        self.counts += stands
        self.rejected = (self.rejected | below) & ~stands
        return torch.where(stands, row, node)

    def _put(self, where: Tensor, tokens: Tensor) -> None:
        at = (self.counts - 1)[:, None]
        before = self.tokens.gather(1, at)[:, 0]
        self.tokens.scatter_(1, at, torch.where(where, tokens, before)[:, None])

    def finish(self, final: Tensor) -> DeviceAcceptance:
        """Return the acceptance result. final: int32 [B], the token that follows the accepted
        tokens of each session; -1 if the target has no finite logit there."""
        self._put(torch.ones_like(self.rejected), final.clamp(min=0))
        flags = (
            RESAMPLED * self.rejected
            + TARGET_ONLY_FALLBACK * self.fallback
            + INVALID_OUTPUT * (final < 0)
        )
        counts = self.counts.to(torch.int32)
        return DeviceAcceptance(counts, self.rows, self.tokens, flags.to(torch.int32))


def advance_state(acceptance: DeviceAcceptance, sequence: SequenceState, slots: Tensor) -> None:
    """Commit a round: add the number of emitted tokens to each session's length, and make its last
    emitted token the root of the next round.

    slots: int32 [B], distinct except for the padding slot, whose state does not change.
    """
    function = advance_state_triton if slots.is_cuda else advance_state_torch
    function(acceptance, sequence, slots)


def advance_state_torch(
    acceptance: DeviceAcceptance, sequence: SequenceState, slots: Tensor
) -> None:
    """Compute `advance_state` with PyTorch operators."""
    live = slots != len(sequence.lengths) - 1
    where = slots.long()
    sequence.lengths.index_add_(0, where, acceptance.counts * live)
    last = acceptance.tokens.gather(1, (acceptance.counts - 1).long()[:, None])[:, 0]
    sequence.roots[where] = torch.where(live, last, sequence.roots[where])


def advance_state_triton(
    acceptance: DeviceAcceptance, sequence: SequenceState, slots: Tensor
) -> None:
    """Compute `advance_state` with Triton kernels."""
    batch, num_nodes = acceptance.tokens.shape
    _advance_state[(1,)](
        acceptance.counts,
        acceptance.tokens,
        sequence.lengths,
        sequence.roots,
        slots,
        batch,
        len(sequence.lengths) - 1,
        NODES=num_nodes,
        BLOCK=next_power_of_2(batch),
        num_warps=1,
    )


def accept_matching_triton(
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    *,
    num_nodes: int,
    simulate: Tensor | int | None = None,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
) -> DeviceAcceptance:
    """Compute `accept_matching` with Triton kernels."""
    batch = chosen.shape[0] // num_nodes
    result = new_acceptance(batch, num_nodes, chosen.device)
    if batch:
        _accept_matching[(batch,)](
            chosen,
            tokens,
            parents,
            simulate if isinstance(simulate, Tensor) else None,
            simulate if isinstance(simulate, int) else 0,
            state.stream_keys,
            slots,
            positions,
            *result,
            NODES=num_nodes,
            BLOCK=next_power_of_2(num_nodes),
            CHAIN=parents is None,
            SIMULATE=simulate is not None,
            PERIODIC=isinstance(simulate, int),
            num_warps=1,
        )
    return result


@triton.jit
def load_parents(parents_ptr, batch, rows, NODES: tl.constexpr, CHAIN: tl.constexpr):
    """Return the row of the parent of each row; -1 for the root and for absent nodes."""
    if CHAIN:
        above = rows - 1
    else:
        inside = (rows > 0) & (rows < NODES)
        where = parents_ptr + batch * (NODES - 1) + rows - 1
        above = tl.load(where, mask=inside, other=-2) + 1
    return above


@triton.jit
def _accept_matching(
    chosen_ptr,
    tokens_ptr,
    parents_ptr,
    simulate_ptr,
    period,
    stream_keys_ptr,
    slots_ptr,
    positions_ptr,
    counts_ptr,
    rows_ptr,
    emitted_ptr,
    flags_ptr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
    SIMULATE: tl.constexpr,
    PERIODIC: tl.constexpr,
):
    """Find the accepted path of one session. Each accepted node of a tree costs one reduction over
    all nodes; a chain needs only one reduction in total."""
    batch = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    inside = rows < NODES
    first = batch * NODES
    drafted = tl.load(tokens_ptr + first + rows, mask=inside, other=-1)
    chosen = tl.load(chosen_ptr + first + rows, mask=inside, other=-1)
    there = inside & (drafted >= 0) & (rows > 0)
    above = load_parents(parents_ptr, batch, rows, NODES, CHAIN)
    path, emitted = rows, tl.full((BLOCK,), -1, tl.int32)
    if CHAIN:
        if SIMULATE:
            where = tl.load(positions_ptr + first + rows - 1, mask=there, other=0)
            drawn_at = tl.where(rows < 0, where, 0) if PERIODIC else where
            keys = noise_key(stream_keys_ptr, tl.load(slots_ptr + batch), _ACCEPT, drawn_at)
            coins = uniform(noise_bits(keys, tl.full((BLOCK,), _SHARED_DRAW_ID, tl.int32)))
            if PERIODIC:
                length = period.to(tl.int64)
                starts = where.to(tl.int64) * _PERIOD_UNIT + (coins * length).to(tl.int64)
                stands = there & (starts // length == (starts + _PERIOD_UNIT) // length)
            else:
                rates = tl.load(simulate_ptr + rows - 1, mask=there, other=0.0)
                stands = there & (coins < rates.to(tl.float64))
        else:
            wanted = tl.load(chosen_ptr + first + rows - 1, mask=there, other=-1)
            stands = there & (drafted == wanted)
        count = tl.min(tl.where(stands | (rows == 0), NODES, rows), 0)
        node = count - 1
        following = tl.load(tokens_ptr + first + rows + 1, mask=rows < NODES - 1, other=-1)
        emitted = tl.where(rows < node, following, emitted)
    else:
        count = tl.full((), 0, tl.int32)
        node = tl.full((), 0, tl.int32)
        child = tl.full((), 0, tl.int32)
        while child < NODES:
            node = child
            count += 1
            path = tl.where(rows == count - 1, node, path)
            wanted = tl.sum(tl.where(rows == node, chosen, 0), 0)
            stands = there & (above == node) & (drafted == wanted)
            child = tl.min(tl.where(stands, rows, NODES), 0)
            emitted = tl.where((rows == count - 1) & (child < NODES), wanted, emitted)
    final = tl.sum(tl.where(rows == node, chosen, 0), 0)
    emitted = tl.where(rows == count - 1, tl.maximum(final, 0), emitted)
    below = there & (above == node)
    flags = tl.max(below.to(tl.int32), 0) * _RESAMPLED
    flags += (final < 0).to(tl.int32) * _INVALID_OUTPUT
    tl.store(counts_ptr + batch, count)
    tl.store(rows_ptr + first + rows, path, mask=inside)
    tl.store(emitted_ptr + first + rows, emitted, mask=inside)
    tl.store(flags_ptr + batch, flags)


@triton.jit
def _advance_state(
    counts_ptr,
    tokens_ptr,
    lengths_ptr,
    roots_ptr,
    slots_ptr,
    batch,
    padding_slot,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Commit a round of all sessions of the bucket, in one program."""
    index = tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + index, mask=index < batch, other=0)
    live = (index < batch) & (slots != padding_slot)
    counts = tl.load(counts_ptr + index, mask=live, other=1)
    lengths = tl.load(lengths_ptr + slots, mask=live, other=0)
    last = tl.load(tokens_ptr + index * NODES + counts - 1, mask=live, other=0)
    tl.store(lengths_ptr + slots, lengths + counts, mask=live)
    tl.store(roots_ptr + slots, last, mask=live)
