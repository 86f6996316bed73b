"""Prefill chunks of a round, batched with the decoding sessions.

Shapes: Q prefill chunks of a bucket, P = CHUNK_TOKENS token rows of a prefill chunk, X session
slots, T blocks of a block table. If a round has several prefill chunks of one prompt, they are
consecutive, and each attends to the KV that the chunks before it write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.graphs.shapes import CHUNK_TOKENS
from outrider.engine.device.inputs.round_inputs import NO_TOKEN, int32_zeros
from outrider.engine.device.target_kernels import RowGroup
from outrider.engine.device.transfer.buffers import Uploader
from outrider.engine.kernels.attention.layout import RoundLayout, tree_layout
from outrider.engine.kernels.session_tensors import SequenceState

_FIELDS = 4
"""Number of int32 fields of a prefill chunk beside its tokens: slot, start, count, and whether its
prompt ends with it."""


class PrefillChunkInput(NamedTuple):
    """Up to CHUNK_TOKENS consecutive prompt tokens of one session."""

    slot: int
    start: int
    """Position of the first token."""
    tokens: NDArray[np.int32]
    following: int
    """Prompt token after the chunk; NO_TOKEN at the end of the prompt, where a token is sampled."""
    allowed: NDArray[np.uint32] | None = None
    """[1, W]: allowed-token mask of the sampled token, in W words of 32 token ids each; None if
    every token is allowed."""


def cut_chunks(
    slot: int, prompt: NDArray[np.int32], start: int, end: int
) -> list[PrefillChunkInput]:
    """Return the prefill chunks for the prompt tokens from `start` up to `end`, `end` excluded, of
    the session in `slot`."""
    chunks: list[PrefillChunkInput] = []
    for first in range(start, end, CHUNK_TOKENS):
        stop = min(first + CHUNK_TOKENS, end)
        following = int(prompt[stop]) if stop < len(prompt) else NO_TOKEN
        chunks.append(PrefillChunkInput(slot, first, prompt[first:stop], following))
    return chunks


class PrefillChunkInputs:
    """Static input tensors of the prefill chunks of a bucket. Unused chunks are padding."""

    def __init__(self, chunks: int, *, padding: int, device: torch.device) -> None:
        """`chunks`: number Q of prefill chunks of the bucket. `padding`: session slot of unused
        chunks."""
        self.num_chunks, self._padding = chunks, padding
        fields, cells = _FIELDS * chunks, chunks * CHUNK_TOKENS
        self._buffer = int32_zeros(fields + 2 * cells, device)
        self._uploader = Uploader(fields + 2 * cells, device)
        self.slots, self.starts, self.counts, self.ends = self._buffer[:fields].view(_FIELDS, -1)
        """int32 [Q] each: slot, first position, number of tokens, and 1 if the prompt ends with the
        chunk."""
        grids = self._buffer[fields:].view(2, chunks, CHUNK_TOKENS)
        self.tokens, self.following = grids
        """int32 [Q, P] each: the tokens of each chunk, and the token after each of them. NO_TOKEN
        for unused token rows, and where the following token is not known yet."""

    def fill_chunks(self, chunks: Sequence[PrefillChunkInput]) -> None:
        """Upload up to Q prefill chunks, in stream order. The remaining chunks of the bucket become
        padding."""
        words = self._uploader.stage_int32s()
        fields = words[: _FIELDS * self.num_chunks].reshape(_FIELDS, -1)
        grids = words[fields.size :].reshape(2, self.num_chunks, CHUNK_TOKENS)
        fields[0] = self._padding
        fields[1:] = 0
        grids[:] = NO_TOKEN
        for place, chunk in enumerate(chunks):
            count, ends = len(chunk.tokens), chunk.following == NO_TOKEN
            fields[:, place] = chunk.slot, chunk.start, count, ends
            grids[0, place, :count] = chunk.tokens
            grids[1, place, : count - 1] = chunk.tokens[1:]
            grids[1, place, count - 1] = chunk.following
        self._uploader.start_upload(self._buffer)

    def row_group(self, tables: Tensor, *, block_tokens: int) -> RowGroup:
        """Return the token rows of the prefill chunks as a group for the target's forward pass.
        `tables`: int32 [X, T], the block tables of all session slots."""
        layout = tree_layout(
            None,
            self.starts,
            tables,
            self.slots,
            num_nodes=CHUNK_TOKENS,
            block_tokens=block_tokens,
        )
        # Unused rows of a chunk must not write: the stale end of its table may name blocks of
        # others.
        slots = layout.write_slots.view(self.tokens.shape).masked_fill(self.tokens < 0, -1)
        layout = RoundLayout(layout.positions, slots.flatten(), None)
        return RowGroup(self.slots, self.starts, layout, CHUNK_TOKENS)

    def live_rows(self) -> Tensor:
        """Return the index of each prefill chunk's last token among the Q * P token rows, int64
        [Q]."""
        first = torch.arange(
            0, self.tokens.numel(), CHUNK_TOKENS, dtype=torch.int64, device=self.counts.device
        )
        rows: Tensor = first + self.counts.clamp(min=1) - 1
        return rows

    def next_positions(self) -> Tensor:
        """Return the position of the token after each prefill chunk, int32 [Q]."""
        positions: Tensor = self.starts + self.counts
        return positions

    def ended_slots(self) -> Tensor:
        """Return the session slot of each chunk with which a prompt ends, int64 [Q]. Other chunks
        have the padding slot."""
        return torch.where(self.ends > 0, self.slots, self._padding).long()

    def set_first_tokens(self, sequence: SequenceState, first: Tensor) -> None:
        """Set the root and the length of each session whose prompt ends with its chunk. `first`:
        int32 [Q], the token after each chunk, which becomes the root."""
        ends, where = self.ends > 0, self.ended_slots()
        # The padding slot may be written several times; it keeps its state.
        lengths = torch.where(ends, self.next_positions() + 1, 1)
        sequence.lengths.index_copy_(0, where, lengths)
        sequence.roots.index_copy_(0, where, torch.where(ends, first, 0))
