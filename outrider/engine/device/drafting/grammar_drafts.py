"""In-process drafts under grammars: drafted with masks and read back by the host.

Chains are drafted level by level, trees at once.

X session slots, B rows of a pass, n in-process drafts.
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
    """Host access to the drafts of sessions with a grammar. Reads wait for the device, so it is
    only used for such sessions."""

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
        """Slots of the newest pass over chains, row by row."""
        self._drafted: PendingDownload | None = None
        """Tokens that this pass drafted, int32 [B]."""
        rows = buckets_up_to(ROW_BUCKETS, max_sessions)[-1]
        self._given = int32_zeros(rows * (1 + self.length), device)
        """Slots [B], and the chains that their next round verifies [B, n]."""
        self._masks = DraftTokenMasks(
            levels=1,
            max_rows=rows,
            vocab_size=vocab_size,
            target_ids=in_process_drafter.program.forward.vocabulary.target_ids,
            device=device,
            num_beside=2 * rows,
            # A round waits for all of its own.
            ring=4 * (1 + self.length),
        )
        """With slots [B], and the level that is drafted [B]."""

    def start_drafts(
        self, slots: Sequence[int], allowed_tokens: Sequence[Masks | None], *, seen: bool = False
    ) -> None:
        """Draft anew from what stands, chains their first tokens, trees all; under these masks
        [1, W] of the first level, None: anything. `seen`: chains have begun with the round. Does
        not wait.

        The noise is that of a first time: where a mask has the token that was drawn under none, it
        is drawn again.
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
        """Draft a level of chains under these masks, in the order of the slots, and let the head
        think of the next one. Does not wait."""
        rows = self._tell(slots, level, allowed_tokens)
        drafted = self._graphs.run_graph(("choose", rows), lambda: self._choose(rows))
        self._slots_drafted, self._drafted = slots, self._downloads.start_download(drafted)
        if level + 1 < self.length:
            self._graphs.run_graph(("step", rows), lambda: self._step(rows))

    def has_token(self, token: int) -> bool:
        """Whether a target id is in the head's vocabulary, so that it is what is drafted under a
        mask of nothing else."""
        return self._masks.has_token(token)

    def replace_tokens(self, slots: Sequence[int], tokens: NDArray[np.int32], level: int) -> None:
        """Replace what was drafted up to this level by tokens int32 [len(slots), n], and let the
        head think of the next one again. Does not wait."""
        self.write_chains(slots, tokens)
        rows = self._tell(slots, level)
        self._graphs.run_graph(("step", rows), lambda: self._step(rows))

    def has_started(self, slots: Sequence[int]) -> bool:
        """Return whether the newest pass included all of these slots."""
        return set(slots) <= set(self._slots_drafted)

    def read_chains(self) -> dict[int, int]:
        """By slot: the tokens that the newest pass drafted. Waits for it."""
        assert self._drafted is not None
        return dict(zip(self._slots_drafted, self._drafted.wait_array().tolist(), strict=False))

    def read_trees(self, slots: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of the trees that the next round of these slots' sessions verifies: tokens and parents,
        int32 [len(slots), n] each; -1 and PADDING_NODE where there is no node. Waits."""
        tokens, parents = self.drafter.read_trees(slots)
        return tokens.numpy(), parents.numpy()

    def write_chains(self, slots: Sequence[int], tokens: NDArray[np.int32]) -> None:
        """Let the next round of these slots' sessions verify other chains: int32 [len(slots), n],
        -1 from where there is no more node."""
        rows, width = bucket_for(len(slots), ROW_BUCKETS), tokens.shape[1]
        absent = np.full((rows - len(slots)) * width, -1, dtype=np.int32)
        upload_int32s(self._given[: rows * (1 + width)], self._padded(slots, rows), tokens, absent)
        self._graphs.run_graph(("given drafts", rows), lambda: self._put(rows))

    def warm_up(self) -> None:
        """Compile and capture all bucket sizes, with padding rows only."""
        for rows in buckets_up_to(ROW_BUCKETS, self._max_sessions):
            nowhere = [self.drafter.padding] * rows
            self.start_drafts(nowhere, ())
            if self.are_chains:
                self.write_chains(nowhere, np.full((rows, self.length), -1, dtype=np.int32))
        self._slots_drafted = ()

    def _tell(
        self, slots: Sequence[int], level: int, allowed_tokens: Sequence[Masks | None] = ()
    ) -> int:
        """Whom the next passes are for, which level, and what is allowed there; rows of their
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
