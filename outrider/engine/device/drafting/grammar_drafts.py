"""In-process drafts of sessions with a grammar, drafted under masks and read back by the host.

Chains are drafted one level (position in the chain, from 0) at a time, trees in one pass.

Shapes: B rows of a pass, n in-process drafts per session, W words of a token mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_masks import DraftTokenMasks, Masks
from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shapes import ROW_BUCKETS, bucket_for, buckets_up_to
from outrider.engine.device.inputs.round_inputs import int32_zeros
from outrider.engine.device.transfer.buffers import Downloader, PendingDownload
from outrider.engine.device.transfer.uploads import upload_int32s


class GrammarDraftBuffer:
    """Lets the host make, read and replace the in-process drafts of sessions with a grammar.

    Reading drafts waits for the device, so other sessions do not use this class.
    """

    def __init__(
        self,
        in_process_drafter: InProcessDrafter,
        graphs: GraphCache,
        *,
        max_sessions: int,
        vocab_size: int,
    ) -> None:
        self.drafter, self._graphs = in_process_drafter, graphs
        self._max_sessions = max_sessions
        self._levels = in_process_drafter.levels
        self.are_chains = not in_process_drafter.shape.is_tree
        """Whether drafts are chains."""
        self.length = in_process_drafter.shape.num_nodes
        """Number n of in-process drafts per session."""
        device = in_process_drafter.tokens.device
        self._downloads = Downloader(device)
        self._slots_drafted: Sequence[int] = ()
        """Session slots of the newest pass over chains, in row order."""
        self._drafted: PendingDownload | None = None
        """Tokens int32 [B] that the newest pass over chains drafted."""
        rows = buckets_up_to(ROW_BUCKETS, max_sessions)[-1]
        self._given = int32_zeros(rows * (1 + self.length), device)
        """Slots [B], followed by the chains [B, n] that their next round verifies."""
        self._masks = DraftTokenMasks(
            levels=1,
            max_rows=rows,
            vocab_size=vocab_size,
            target_ids=in_process_drafter.program.forward.vocabulary.target_ids,
            device=device,
            num_beside=2 * rows,
            # A round waits for all uploads of the same round.
            ring=4 * (1 + self.length),
        )
        """Masks of the level to draft, uploaded with the slots [B] and the levels [B]."""

    def start_drafts(
        self, slots: Sequence[int], allowed_tokens: Sequence[Masks | None], *, seen: bool = False
    ) -> None:
        """Start new drafts for these slots after their committed tokens: the first token of each
        chain, or whole trees. Does not wait for the device.

        `allowed_tokens`: for each slot, the mask [1, W] of the first level, or None to allow all
        tokens. `seen`: whether the round has already run the head over its accepted tokens (chains
        only). The noise is the same as without a mask, so a token that was drafted before is
        drafted again if the mask allows it.
        """
        if self._levels is not None and seen:
            self.choose_level(slots, 0, allowed_tokens)
            return
        rows = self._tell(slots, 0, allowed_tokens if self._levels is None else ())
        self._graphs.run_graph(("begin", rows), lambda: self._begin(rows))
        if self._levels is not None:
            self.choose_level(slots, 0, allowed_tokens)

    def choose_level(
        self, slots: Sequence[int], level: int, allowed_tokens: Sequence[Masks | None]
    ) -> None:
        """Draft the token at `level` of each slot's chain under its mask, then run the head to
        compute the logits of the next level. Does not wait for the device. `allowed_tokens`: for
        each slot, the mask [1, W], or None to allow all tokens."""
        rows = self._tell(slots, level, allowed_tokens)
        drafted = self._graphs.run_graph(("choose", rows), lambda: self._choose(rows))
        self._slots_drafted, self._drafted = slots, self._downloads.start_download(drafted)
        if level + 1 < self.length:
            self._graphs.run_graph(("step", rows), lambda: self._step(rows))

    def has_token(self, token: int) -> bool:
        """Return whether the head can draft this target id. If it can, a mask that allows only this
        id makes the head draft it."""
        return self._masks.has_token(token)

    def replace_tokens(self, slots: Sequence[int], tokens: NDArray[np.int32], level: int) -> None:
        """Replace the chains of these slots, then run the head over the token at `level` to compute
        the logits of the next level. Does not wait for the device. tokens: int32 [len(slots), n],
        target ids; -1 for absent nodes at the end of a chain."""
        self.write_chains(slots, tokens)
        rows = self._tell(slots, level)
        self._graphs.run_graph(("step", rows), lambda: self._step(rows))

    def has_started(self, slots: Sequence[int]) -> bool:
        """Return whether the newest pass over chains drafted a token for each of these slots."""
        return set(slots) <= set(self._slots_drafted)

    def read_chains(self) -> dict[int, int]:
        """Wait for the newest pass over chains, and return a dictionary from each of its slots to
        the token that it drafted there."""
        assert self._drafted is not None
        return dict(zip(self._slots_drafted, self._drafted.wait_array().tolist(), strict=False))

    def read_trees(self, slots: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Wait for the device, and return the tokens and the parents of the trees that the next
        round of these slots verifies, int32 [len(slots), n] each. Absent nodes have token -1 and
        parent PADDING_NODE."""
        tokens, parents = self.drafter.read_trees(slots)
        return tokens.numpy(), parents.numpy()

    def write_chains(self, slots: Sequence[int], tokens: NDArray[np.int32]) -> None:
        """Replace the chains that the next round of these slots verifies. Does not wait for the
        device. tokens: int32 [len(slots), n], target ids; -1 for absent nodes at the end of a
        chain."""
        rows, width = bucket_for(len(slots), ROW_BUCKETS), tokens.shape[1]
        absent = np.full((rows - len(slots)) * width, -1, dtype=np.int32)
        upload_int32s(self._given[: rows * (1 + width)], self._padded(slots, rows), tokens, absent)
        self._graphs.run_graph(("given drafts", rows), lambda: self._put(rows))

    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs of all bucket sizes, by passes over padding
        rows."""
        for rows in buckets_up_to(ROW_BUCKETS, self._max_sessions):
            nowhere = [self.drafter.padding] * rows
            self.start_drafts(nowhere, ())
            if self.are_chains:
                self.write_chains(nowhere, np.full((rows, self.length), -1, dtype=np.int32))
        self._slots_drafted = ()

    def _tell(
        self, slots: Sequence[int], level: int, allowed_tokens: Sequence[Masks | None] = ()
    ) -> int:
        """Upload the slots, the level and the masks of the next passes; return the rows of their
        bucket."""
        rows = bucket_for(len(slots), ROW_BUCKETS)
        told = np.full(2 * rows, self.drafter.padding, dtype=np.int32)
        told[: len(slots)] = slots
        told[rows:] = level
        self._masks.set_masks(allowed_tokens, rows, told)
        return rows

    @torch.inference_mode()
    def _begin(self, rows: int) -> None:
        slots = self._masks.beside[:rows]
        if self._levels is None:
            self.drafter.draft_stored(slots, self._masks)
        else:
            self._levels.run_rows(self.drafter.kept.rows_of(slots))

    @torch.inference_mode()
    def _choose(self, rows: int) -> Tensor:
        assert self._levels is not None
        slots, levels = self._masks.beside[: 2 * rows].view(2, rows)
        return self._levels.choose_tokens_at(slots, levels, self._masks)

    @torch.inference_mode()
    def _step(self, rows: int) -> None:
        assert self._levels is not None
        slots, levels = self._masks.beside[: 2 * rows].view(2, rows)
        self._levels.run_level(slots, levels + 1)

    @torch.inference_mode()
    def _put(self, rows: int) -> None:
        slots, tokens = self._given[:rows], self._given[rows : rows * (1 + self.length)]
        self.drafter.first_tokens.index_copy_(0, slots.long(), tokens.view(rows, self.length))

    def _padded(self, slots: Sequence[int], rows: int) -> NDArray[np.int32]:
        padded = np.full(rows, self.drafter.padding, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded
