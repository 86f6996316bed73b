"""Verifier's side of a drafter on another GPU: it receives drafts and sends accepted rows.

`RemoteDrafter` takes the place of an in-process drafter: rounds verify drafts that never pass
through the host, and the state that the next round needs stays on the device. Its counterpart in
the drafter process is `DraftReplica`, which reads the accepted rows of each round.

Shapes: X session slots, B rows of a bucket, n drafts per session, R rows of a launch, H width of a
feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.exchange.draft_replica import ReplicaRound
from outrider.engine.device.exchange.exchange_times import ExchangeTimes
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import SharedMemory
from outrider.engine.device.exchange.side import ExchangeSide
from outrider.engine.device.graphs.shapes import RoundShape
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.trial_capture import outside_capture
from outrider.engine.kernels.acceptance.matching import UNDRAFTED
from outrider.engine.kernels.acceptance.randomized import SparseDistribution
from outrider.engine.kernels.exchange.buffers import CHUNK_ROWS, DECODE_ROWS
from outrider.engine.kernels.exchange.distributions import (
    new_taken_distributions,
    take_distributions,
)
from outrider.engine.kernels.exchange.drafts import (
    advance_digests,
    new_taken_tokens,
    take_drafts,
)
from outrider.engine.kernels.exchange.drafts_ahead import (
    NOT_CHOSEN,
    choose_drafts,
    new_chosen_drafts,
)
from outrider.engine.kernels.exchange.numbers import publish_number, reserve_bank, wait_drafts
from outrider.engine.kernels.exchange.verdicts import put_rows
from outrider.engine.logits_processor import EMPTY_HISTORY, TokenHistory
from outrider.spec.sampling import SamplingParams


class ReplicaHost(Protocol):
    """Interface by which the verifier's host calls functions of a `DraftReplica` in the drafter
    process. Calls return without waiting and are executed in order."""

    def begin_session(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: SamplingParams,
        *,
        num_rows: int,
        history: TokenHistory,
    ) -> None:
        """See `DraftReplica.begin_session`."""

    def add_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """See `DraftReplica.add_blocks`."""

    def end_session(self, slot: int) -> None:
        """End the session of a slot."""

    def launch_round(self, announced: ReplicaRound) -> None:
        """Announce a round that the verifier has launched; see `DraftReplica.launch_round`."""


class RemoteDrafter:
    """`RoundDrafter` that receives drafts from another GPU and sends it the rows of each round."""

    logits_slots: LogitsSlots | None = None
    """None, because the drafter's device keeps the logits-processor state."""

    def __init__(
        self, shape: ExchangeShape, *, vocab_size: int, device: torch.device, timeout_us: int
    ) -> None:
        """`timeout_us`: maximum time that a round waits for drafts, in microseconds."""
        self.exchange_shape = shape
        self.padding = shape.num_slots - 1
        self.vocab_size, self.device = vocab_size, device
        self._side = ExchangeSide(shape, device, timeout_us=timeout_us)
        self._verdicts, self.drafts = self._side.verdicts, self._side.drafts
        """The verdict buffer, which the drafter's device reads, and the draft buffer, which it
        writes."""
        self.state = self._side.state
        self.times = ExchangeTimes(self.state.history.numpy())
        """Times of the rounds of this exchange."""
        self._distributions = new_taken_distributions(
            shape.num_slots, shape.draft_length, shape.distribution_entries, device
        )
        self.chosen = new_chosen_drafts(shape.num_slots, shape.draft_length, device)
        """Look-ahead drafts for the outcomes with which rounds ended. The next round of each
        session verifies them."""
        self.tokens = new_taken_tokens(shape.num_slots, shape.draft_length, device)
        """int32 [X, n]: the drafts that each session's next round verifies; -1 for absent nodes."""
        with torch.inference_mode(False):
            self.digests = torch.zeros(shape.num_slots, dtype=torch.int64, device=device)
            """int64 [X]: digest of each session's prefix."""
        self._lengths: dict[int, Tensor] = {}
        self._ranges: dict[int, Tensor] = {}
        self._has_chunks = False
        self._host: ReplicaHost | None = None
        self._followed: set[int] = set()
        """Slots whose sessions were announced to the drafter."""

    @property
    def is_attached(self) -> bool:
        """Whether a drafter is attached."""
        return self._host is not None

    @property
    def is_open(self) -> bool:
        """Whether a drafter is attached and no round has been missed, according to the device's
        last report."""
        return self._side.is_open

    @property
    def is_late(self) -> bool:
        """Whether the last round that waited for drafts ran without them, according to the device's
        last report."""
        return self._side.is_late

    def attach(self, own: SharedMemory, peer: SharedMemory, host: ReplicaHost) -> None:
        """Start the exchange with a drafter, in stream order.

        own: memory of this process, in which the drafter writes drafts. peer: memory of the
        drafter, in which this process writes its rounds. `detach` closes both. host: interface to
        the drafter's host, which must learn of sessions and rounds.
        """
        self._side.attach(verdicts=peer, drafts=own)
        self.chosen.outcomes.fill_(NOT_CHOSEN)
        self._host = host

    def detach(self) -> None:
        """End the exchange and close its memory. Waits for launched work."""
        self._side.detach()
        self.times.forget()
        self._host = None
        self._followed.clear()

    def begin_session(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: SamplingParams,
        *,
        num_rows: int,
        digest: int,
        history: TokenHistory = EMPTY_HISTORY,
    ) -> None:
        """Begin or resume a session that the drafter drafts for. Does nothing if no drafter is
        attached.

        num_rows: number of draft rows whose KV is already in `blocks`. digest: digest of the
        session's prefix. history: the session's tokens so far, which penalties need.
        """
        if self._host is None:
            return
        self.digests[slot].fill_(digest - (1 << 64) if digest >= 1 << 63 else digest)
        self.chosen.outcomes[slot].fill_(NOT_CHOSEN)
        self._followed.add(slot)
        self._host.begin_session(slot, blocks, sampling, num_rows=num_rows, history=history)

    def add_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Add KV blocks to a session's block table, from index `first` on."""
        if self._host is not None and slot in self._followed:
            self._host.add_blocks(slot, first, blocks)

    def end_session(self, slot: int) -> None:
        """End the session of a slot."""
        if self._host is not None and slot in self._followed:
            self._followed.discard(slot)
            self._host.end_session(slot)

    def announce_round(self, shape: RoundShape, *, rejection: bool) -> None:
        """Announce a launched round to the drafter, which drafts after it. `rejection`: whether any
        session of the round, including sessions in prefill, has the rejection rule."""
        if self._host is not None:
            rejection = rejection and shape.is_sampled
            rows, most = shape.rows + shape.chunks, self.exchange_shape.ahead_rows
            is_ahead = self.exchange_shape.fan_out > 0 and not shape.chunks and rows <= most
            self._host.launch_round(
                ReplicaRound(rows, shape.chunks, shape.is_sampled, is_ahead, rejection)
            )

    def parents_of(self, num_nodes: int) -> None:
        """Return None, because drafts are chains."""

    def receive_drafts(
        self, slots: Tensor, *, num_nodes: int, rejection: bool
    ) -> SparseDistribution | None:
        """Wait on the device for the drafts of the sessions in `slots`, int32 [B], and copy them to
        `tokens`. Return their distributions, or None if `rejection` is not set or drafts have no
        distributions."""
        lengths = self._static(self._lengths, len(slots))
        wait_drafts(self.drafts, self.state, slots, self.chosen.outcomes, padding=self.padding)
        take_drafts(
            self.drafts,
            self.state,
            slots,
            self.digests,
            self.tokens,
            lengths,
            chosen=self.chosen,
            vocab_size=self.vocab_size,
        )
        if not rejection or not self.exchange_shape.distribution_entries:
            return None
        ranges = self._static(self._ranges, len(slots), self.exchange_shape.num_nodes, 2)
        take_distributions(
            self.drafts,
            self.state,
            slots,
            self.tokens,
            lengths,
            self._distributions,
            ranges,
            chosen=self.chosen,
            vocab_size=self.vocab_size,
        )
        if num_nodes < self.exchange_shape.num_nodes:
            # The last node that is verified has no draft to reject.
            ranges = ranges[:, :num_nodes].contiguous()
            ranges[:, -1].zero_()
        return self._distributions.with_ranges(ranges)

    def flag_undrafted(self, flags: Tensor) -> Tensor:
        """Return the acceptance flags, int32 [B], of the rows of the last `receive_drafts` call,
        with UNDRAFTED added for rows without a draft."""
        return torch.add(flags, self._static(self._lengths, len(flags)) == 0, alpha=UNDRAFTED)

    def _static(self, known: dict[int, Tensor], *shape: int) -> Tensor:
        """Return an int32 tensor that all graphs with the same number of rows share."""
        found = known.get(shape[0])
        if found is None:
            with outside_capture(self.device), torch.inference_mode(False):
                found = torch.zeros(shape, dtype=torch.int32, device=self.device)
            known[shape[0]] = found
        return found

    def begin_rows(self) -> None:
        """Prepare for the rows of a launch. Closes the exchange if the drafter is so late that the
        verdict buffer has no free bank for them."""
        self._has_chunks = False
        reserve_bank(self.drafts, self.state, depth=self._verdicts.depth)

    def write_rows(self, rows: NewRows) -> None:
        """Send the drafter draft rows of prefill chunks, after which it does not draft."""
        self._has_chunks = True
        self._put(CHUNK_ROWS, rows, self.exchange_shape.max_chunks, rows.tokens.shape[1])

    def draft_round(self, rows: NewRows, *, num_nodes: int, sampled: bool) -> None:
        """Send the drafter the rows after which it drafts, and then the round's number, which tells
        it that the data are complete."""
        del num_nodes, sampled
        shape = self.exchange_shape
        advance_digests(self.digests, rows.slots, rows.tokens, rows.counts)
        if shape.fan_out:
            choose_drafts(
                self.drafts,
                self.state,
                rows.slots,
                self.digests,
                self.chosen,
                outcomes=shape.fan_out,
                vocab_size=self.vocab_size,
                padding=self.padding,
            )
        self._put(DECODE_ROWS, rows, shape.max_rows, shape.num_nodes)
        count = -1 if self._has_chunks else rows.tokens.shape[0]
        publish_number(self._verdicts, self.state, step=1, rows=count)

    def _put(self, first: int, rows: NewRows, capacity: int, width: int) -> None:
        put_rows(
            self._verdicts,
            self.state,
            first=first,
            slots=rows.slots,
            counts=rows.counts,
            starts=rows.starts,
            digests=self.digests,
            tokens=rows.tokens,
            features=rows.features,
            outcomes=self.chosen.outcomes if first == DECODE_ROWS else None,
            capacity=capacity,
            width=width,
            padding=self.padding,
        )
