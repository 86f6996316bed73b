"""Own drafts that follow grammars: read by the host, and drawn anew under masks where they do not.

X session slots, n own drafts, L levels that can be masked, B rows of the bucket, Vd draft
vocabulary, W words of 32 target ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.graphs import GraphCache
from outrider.engine.device.inputs import zeros
from outrider.engine.device.own_head import OwnHead
from outrider.engine.device.shapes import ROW_BUCKETS, bucket, up_to
from outrider.engine.device.uploads import upload


class FormDrafts:
    """The drafts of an own head as the host sees them. It waits for the device: only sessions in a
    grammar are asked about."""

    def __init__(
        self, own_head: OwnHead, graphs: GraphCache, *, max_sessions: int, vocab_size: int
    ) -> None:
        self._head, self._graphs = own_head, graphs
        self._max_sessions = max_sessions
        self.words = -(-vocab_size // 32)
        self.levels = own_head.shape.maskable_levels
        self.chains = not own_head.shape.is_tree
        """Whether drafts are chains."""
        rows, device = up_to(ROW_BUCKETS, max_sessions)[-1], own_head.tokens.device
        self._slots = zeros(rows, device)
        self._bits = zeros(self.levels * rows * self.words, device)

    def read(self, slots: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens and parents, int32 [len(slots), n] each, of the drafts that the next round of
        these slots' sessions verifies; -1 and PADDING_NODE where there is no node."""
        tokens = self._head.tokens.cpu().numpy()[list(slots)]
        if self._head.parents is None:
            parents: NDArray[np.int32] = np.arange(-1, tokens.shape[1] - 1, dtype=np.int32)
            return tokens, np.broadcast_to(parents, tokens.shape)
        return tokens, self._head.parents.cpu().numpy()[list(slots)]

    @torch.inference_mode()
    def write(self, slots: Sequence[int], tokens: NDArray[np.int32]) -> None:
        """Let the next round of these slots' sessions verify other chains: int32 [len(slots), n],
        -1 from where there is no more node."""
        rows, width = tokens.shape
        given = torch.empty(rows * (1 + width), dtype=torch.int32, device=self._slots.device)
        upload(np.concatenate((np.array(slots, dtype=np.int32), tokens.reshape(-1))), given)
        self._head.tokens.index_copy_(0, given[:rows].long(), given[rows:].view(rows, width))

    def redraft(self, slots: Sequence[int], legal: NDArray[np.uint32]) -> None:
        """Draft anew from what stands. legal: uint32 [len(slots), L, W], what may be drafted at
        each level; where it leaves nothing of the draft vocabulary, anything may.

        The noise is that of the first time: a level whose mask has the token that was drawn there
        draws it again.
        """
        rows = bucket(len(slots), ROW_BUCKETS)
        padded = np.full(rows, self._head.padding, dtype=np.int32)
        padded[: len(slots)] = slots
        bits = np.zeros((self.levels, rows, self.words), dtype=np.uint32)
        bits[:, : len(slots)] = legal.swapaxes(0, 1)
        upload(padded, self._slots[:rows])
        upload(bits.reshape(-1).view(np.int32), self._bits[: bits.size])
        self._run(rows)

    def warm_up(self) -> None:
        """Compile and capture all buckets, with nothing but padding."""
        for rows in up_to(ROW_BUCKETS, self._max_sessions):
            upload(np.full(rows, self._head.padding, dtype=np.int32), self._slots[:rows])
            self._run(rows)

    @torch.inference_mode()
    def _run(self, rows: int) -> None:
        slots = self._slots[:rows]
        legal = self._bits[: self.levels * rows * self.words].view(self.levels, rows, -1)
        self._graphs.run(("redraft", rows), lambda: self._head.redraft(slots, legal))
