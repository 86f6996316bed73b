"""Drafter on another GPU, as the verifier's graphs see it: drafts come in, accepted rows go out.

It stands where an in-process drafter would: rounds verify drafts that never pass through the host,
and the state of the next round is on the device. What it puts for a round, `DraftReplica` takes.

X session slots, B rows of a bucket, n drafts, R rows of a launch, H width of a feature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import SharedMemory, attach_buffer, new_buffer
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.acceptance.randomized import DenseChainDistribution
from outrider.engine.kernels.exchange.buffers import CHUNK_ROWS, DECODE_ROWS, new_state
from outrider.engine.kernels.exchange.drafts import (
    advance_digests,
    new_taken_drafts,
    take_drafts,
)
from outrider.engine.kernels.exchange.numbers import publish_number, reserve_bank, wait_drafts
from outrider.engine.kernels.exchange.verdicts import put_rows


class RemoteDrafter:
    """Takes drafts from another GPU and gives it the rows of each round."""

    parents: Tensor | None = None
    """Drafts are chains."""
    distribution: DenseChainDistribution | None = None
    """Drafts of the rejection rule are judged target-only."""
    logits_slots: LogitsSlots | None = None
    """The drafter's own device knows it."""

    def __init__(
        self, shape: ExchangeShape, *, vocab_size: int, device: torch.device, timeout_us: int
    ) -> None:
        """`timeout_us`: microseconds that a round waits for drafts."""
        self.exchange_shape = shape
        self.padding = shape.num_slots - 1
        self._vocab_size, self._device = vocab_size, device
        self._verdicts = new_buffer(shape.verdict_layout(), device)
        self._drafts = new_buffer(shape.draft_layout(), device)
        self.state = new_state(device)
        self.state.host_control[1] = timeout_us
        self._taken = new_taken_drafts(
            shape.num_slots, shape.draft_length, shape.distribution_entries, device
        )
        self.tokens = self._taken.tokens
        """int32 [X, n]: the drafts that each session's next round verifies; -1: no node."""
        with torch.inference_mode(False):
            self.digests = torch.zeros(shape.num_slots, dtype=torch.int64, device=device)
            """int64 [X]: digest of each session's prefix."""
        self._lengths: dict[int, Tensor] = {}
        self.is_attached = False

    def attach(self, own: SharedMemory, peer: SharedMemory) -> None:
        """Exchange with a drafter from the next round on: drafts in `own` memory, rounds in the
        `peer`'s, in the order of the stream."""
        attach_buffer(self._drafts, self.exchange_shape.draft_layout(), own)
        attach_buffer(self._verdicts, self.exchange_shape.verdict_layout(), peer)
        self.state.words.copy_(torch.tensor([0, 1, 0, 1], dtype=torch.int32))
        self.is_attached = True

    def detach(self) -> None:
        """Exchange with nobody any more, in the order of the stream; waits end at once."""
        self.state.words[1].fill_(0)
        self.is_attached = False

    def begin_session(self, slot: int, digest: int) -> None:
        """A session begins, or comes back, with a prefix of this digest."""
        signed = digest - (1 << 64) if digest >= 1 << 63 else digest
        self.digests[slot].fill_(signed)

    def receive_drafts(self, slots: Tensor) -> None:
        """Wait for the drafts of these sessions' next round, int32 [B], and take them."""
        lengths = self._lengths.get(len(slots))
        if lengths is None:
            with torch.inference_mode(False):
                lengths = torch.zeros(len(slots), dtype=torch.int32, device=self._device)
            self._lengths[len(slots)] = lengths
        wait_drafts(self._drafts, self.state)
        take_drafts(
            self._drafts,
            self.state,
            slots,
            self.digests,
            self._taken,
            lengths,
            vocab_size=self._vocab_size,
            with_distributions=False,
        )

    def begin_rows(self) -> None:
        """Rows of a launch are put next."""
        reserve_bank(self._drafts, self.state, depth=self._verdicts.depth)

    def write_rows(self, rows: NewRows) -> None:
        """Give the drafter rows of prompts whose prediction nobody wants."""
        self._put(CHUNK_ROWS, rows, self.exchange_shape.max_chunks, rows.tokens.shape[1])

    def draft_round(self, rows: NewRows, *, sampled: bool) -> None:
        """Give the drafter the rows behind which it is to draft, and end the launch's round."""
        del sampled
        shape = self.exchange_shape
        advance_digests(self.digests, rows.slots, rows.tokens, rows.counts)
        self._put(DECODE_ROWS, rows, shape.max_rows, shape.num_nodes)
        publish_number(self._verdicts, self.state, step=1)

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
            capacity=capacity,
            width=width,
            padding=self.padding,
        )
