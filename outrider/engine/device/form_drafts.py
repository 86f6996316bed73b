"""Own drafts that follow grammars: read by the host, and drawn anew under masks where they do not.

X session slots, n own drafts, A others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        self._others: Tensor | None = None
        """Of the last pass, int32 [B, n, A];"""
        self._rows: dict[int, int] = {}
        """its rows, by slot, until they have been read."""
        rows, device = up_to(ROW_BUCKETS, max_sessions)[-1], own_head.tokens.device
        self._slots = zeros(rows, device)
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
        tokens = self._head.tokens.cpu().numpy()[list(slots)]
        others = np.full((*tokens.shape, NUM_OTHERS), -1, dtype=np.int32)
        if self._others is not None and self._rows:
            known = self._others.cpu().numpy()
            for row, slot in enumerate(slots):
                if slot in self._rows:
                    others[row] = known[self._rows[slot]]
            # The next drafts may come without a pass.
            self._rows.clear()
        return tokens, others

    def trees(self, slots: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of the trees that it verifies: tokens and parents, int32 [len(slots), n] each; -1 and
        PADDING_NODE where there is no node."""
        assert self._head.parents is not None
        tokens, parents = self._head.tokens.cpu().numpy(), self._head.parents.cpu().numpy()
        return tokens[list(slots)], parents[list(slots)]

    @torch.inference_mode()
    def write(self, slots: Sequence[int], tokens: NDArray[np.int32]) -> None:
        """Let the next round of these slots' sessions verify other chains: int32 [len(slots), n],
        -1 from where there is no more node."""
        rows, width = tokens.shape
        given = torch.empty(rows * (1 + width), dtype=torch.int32, device=self._slots.device)
        upload(np.concatenate((np.array(slots, dtype=np.int32), tokens.reshape(-1))), given)
        self._head.tokens.index_copy_(0, given[:rows].long(), given[rows:].view(rows, width))

    def redraft(self, slots: Sequence[int], legal: Sequence[Masks]) -> None:
        """Draft anew from what stands, under these masks.

        The noise is that of the first time: a level whose mask has the token that was drawn there
        draws it again.
        """
        rows = bucket(len(slots), ROW_BUCKETS)
        padded = np.full(rows, self._head.padding, dtype=np.int32)
        padded[: len(slots)] = slots
        upload(padded, self._slots[:rows])
        self._masks.fill(legal, rows)
        self._others = self._run(rows)
        self._rows = {slot: row for row, slot in enumerate(slots)}

    def warm_up(self) -> None:
        """Compile and capture all buckets, with nothing but padding."""
        for rows in up_to(ROW_BUCKETS, self._max_sessions):
            upload(np.full(rows, self._head.padding, dtype=np.int32), self._slots[:rows])
            self._run(rows)

    @torch.inference_mode()
    def _run(self, rows: int) -> Tensor | None:
        slots = self._slots[:rows]
        return self._graphs.run(("redraft", rows), lambda: self._head.redraft(slots, self._masks))
