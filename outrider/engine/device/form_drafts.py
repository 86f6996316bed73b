"""Own drafts that follow grammars: read by the host, and drawn under masks.

X session slots, B rows of a pass, n own drafts, A others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.buffers import Downloader, Readback
from outrider.engine.device.draft_masks import DraftMasks, Masks
from outrider.engine.device.graphs import GraphCache
from outrider.engine.device.inputs import zeros
from outrider.engine.device.other_ids import NUM_OTHERS
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
        self.levels = own_head.shape.maskable_levels
        """Levels whose drafts can be masked."""
        self.are_chains = not own_head.shape.is_tree
        """Whether drafts are chains."""
        device = own_head.tokens.device
        self._downloads = Downloader(device)
        self._drafted: Readback | None = None
        """Of the last pass over chains, int32 [B, n, 1 + A]: drafted, and the others;"""
        self._rows: dict[int, int] = {}
        """its rows, by slot, until they have been read."""
        rows = up_to(ROW_BUCKETS, max_sessions)[-1]
        self._slots = zeros(rows, device)
        self._given = zeros(rows * (1 + own_head.shape.num_nodes), device)
        """Slots [B], and the chains that their next round verifies [B, n]."""
        self._masks = DraftMasks(
            levels=self.levels,
            max_rows=rows,
            vocab_size=vocab_size,
            target_ids=own_head.program.weights.target_ids,
            device=device,
        )

    def chains(self, slots: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of the chains that the next round of these slots' sessions verifies: tokens int32
        [len(slots), n], and what else might have been drafted, int32 [len(slots), n, A], best
        first, which is told once after a pass; -1 where there is nothing."""
        found = np.full((len(slots), self._head.shape.num_nodes, 1 + NUM_OTHERS), -1, np.int32)
        if self._rows and self._drafted is not None:
            drafted = self._drafted.wait_array()
            for row, slot in enumerate(slots):
                if slot in self._rows:
                    found[row] = drafted[self._rows[slot]]
        if not all([slot in self._rows for slot in slots]):
            known = self._head.tokens.cpu().numpy()
            for row, slot in enumerate(slots):
                if slot not in self._rows:
                    found[row, :, 0] = known[slot]
        # The next drafts may come without a pass.
        self._rows = {}
        return found[:, :, 0], found[:, :, 1:]

    def trees(self, slots: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of the trees that it verifies: tokens and parents, int32 [len(slots), n] each; -1 and
        PADDING_NODE where there is no node."""
        assert self._head.parents is not None
        tokens, parents = self._head.tokens.cpu().numpy(), self._head.parents.cpu().numpy()
        return tokens[list(slots)], parents[list(slots)]

    def write(self, slots: Sequence[int], tokens: NDArray[np.int32]) -> None:
        """Let the next round of these slots' sessions verify other chains: int32 [len(slots), n],
        -1 from where there is no more node."""
        rows, width = bucket(len(slots), ROW_BUCKETS), tokens.shape[1]
        absent = np.full((rows - len(slots)) * width, -1, dtype=np.int32)
        upload(self._given[: rows * (1 + width)], self._padded(slots, rows), tokens, absent)
        self._graphs.run(("given drafts", rows), lambda: self._put(rows))

    @torch.inference_mode()
    def _put(self, rows: int) -> None:
        width = self._head.shape.num_nodes
        slots, tokens = self._given[:rows], self._given[rows : rows * (1 + width)]
        self._head.tokens.index_copy_(0, slots.long(), tokens.view(rows, width))

    def redraft(self, slots: Sequence[int], legal: Sequence[Masks | None]) -> None:
        """Draft anew from what stands, under these masks; None: anything. Does not wait.

        The noise is that of a first time: a level whose mask has the token that was drawn there
        draws it again.
        """
        rows = bucket(len(slots), ROW_BUCKETS)
        upload(self._slots[:rows], self._padded(slots, rows))
        self._masks.fill(legal, rows)
        drafted = self._graphs.run(("redraft", rows), lambda: self._redraft(rows))
        self._drafted = None if drafted is None else self._downloads.start(drafted)
        self._rows = {slot: row for row, slot in enumerate(slots)}

    def warm_up(self) -> None:
        """Compile and capture all buckets, with nothing but padding."""
        for rows in up_to(ROW_BUCKETS, self._max_sessions):
            self.redraft([self._head.padding] * rows, ())
            if self.are_chains:
                absent = np.full((rows, self._head.shape.num_nodes), -1, dtype=np.int32)
                self.write([self._head.padding] * rows, absent)
        self._rows = {}

    @torch.inference_mode()
    def _redraft(self, rows: int) -> Tensor | None:
        return self._head.redraft(self._slots[:rows], self._masks)

    def _padded(self, slots: Sequence[int], rows: int) -> NDArray[np.int32]:
        padded = np.full(rows, self._head.padding, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded
