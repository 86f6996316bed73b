"""Pieces of prompts: rows of a round beside the sessions that decode.

Q pieces of a bucket, P = PIECE_TOKENS rows a piece, X session slots, T blocks of a table. A prompt
that takes several pieces of one round has them one after the other: each sees what the ones before
it write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.graphs.shapes import PIECE_TOKENS
from outrider.engine.device.inputs.round_inputs import NO_TOKEN, zeros
from outrider.engine.device.target_program import RowGroup
from outrider.engine.device.transfer.buffers import Uploader
from outrider.engine.kernels.attention.layout import RoundLayout, tree_layout
from outrider.engine.kernels.session_tensors import SequenceState

_FIELDS = 4
"""Words of a piece beside its tokens: slot, start, count, whether its prompt ends with it."""


class Piece(NamedTuple):
    """Up to PIECE_TOKENS consecutive prompt tokens of one session."""

    slot: int
    start: int
    """Position of the first one."""
    tokens: NDArray[np.int32]
    following: int
    """The prompt token after them; NO_TOKEN where the prompt ends, so that one is sampled."""
    legal: NDArray[np.uint32] | None = None
    """[1, W]: what a grammar allows after them, where one is sampled; None: anything."""


def cut(slot: int, prompt: NDArray[np.int32], start: int, end: int) -> list[Piece]:
    """The pieces of prompt tokens `start` .. `end`."""
    pieces: list[Piece] = []
    for first in range(start, end, PIECE_TOKENS):
        stop = min(first + PIECE_TOKENS, end)
        following = int(prompt[stop]) if stop < len(prompt) else NO_TOKEN
        pieces.append(Piece(slot, first, prompt[first:stop], following))
    return pieces


class PieceInputs:
    """Static tensors of a bucket's pieces; those beyond the given ones are absent."""

    def __init__(self, pieces: int, *, padding: int, device: torch.device) -> None:
        """`padding`: the slot of absent pieces."""
        self.num_pieces, self._padding = pieces, padding
        fields, cells = _FIELDS * pieces, pieces * PIECE_TOKENS
        self._buffer = zeros(fields + 2 * cells, device)
        self._uploader = Uploader(fields + 2 * cells, device)
        self.slots, self.starts, self.counts, self.ends = self._buffer[:fields].view(_FIELDS, -1)
        """int32 [Q] each; `ends` is 1 where a prompt ends."""
        grids = self._buffer[fields:].view(2, pieces, PIECE_TOKENS)
        self.tokens, self.following = grids
        """int32 [Q, P] each: tokens, and the token after each of them; NO_TOKEN where there is
        none, or none yet."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Describe n <= Q pieces, in the order of the stream."""
        words = self._uploader.stage()
        fields = words[: _FIELDS * self.num_pieces].reshape(_FIELDS, -1)
        grids = words[fields.size :].reshape(2, self.num_pieces, PIECE_TOKENS)
        fields[0] = self._padding
        fields[1:] = 0
        grids[:] = NO_TOKEN
        for place, piece in enumerate(pieces):
            count, ends = len(piece.tokens), piece.following == NO_TOKEN
            fields[:, place] = piece.slot, piece.start, count, ends
            grids[0, place, :count] = piece.tokens
            grids[1, place, : count - 1] = piece.tokens[1:]
            grids[1, place, count - 1] = piece.following
        self._uploader.send(self._buffer)

    def group(self, tables: Tensor, *, block_tokens: int) -> RowGroup:
        """The pieces as rows of a forward; tables int32 [X, T]."""
        layout = tree_layout(
            None,
            self.starts,
            tables,
            self.slots,
            num_nodes=PIECE_TOKENS,
            block_tokens=block_tokens,
        )
        # What a piece leaves free may belong to another session by its table's stale end.
        slots = layout.write_slots.view(self.tokens.shape).masked_fill(self.tokens < 0, -1)
        layout = RoundLayout(layout.positions, slots.flatten(), None)
        return RowGroup(self.slots, self.starts, layout, PIECE_TOKENS)

    def live_rows(self) -> Tensor:
        """int64 [Q]: each piece's last row among the Q * P rows."""
        first = torch.arange(
            0, self.tokens.numel(), PIECE_TOKENS, dtype=torch.int64, device=self.counts.device
        )
        rows: Tensor = first + self.counts.clamp(min=1) - 1
        return rows

    def next_positions(self) -> Tensor:
        """int32 [Q]: position of the token after each piece."""
        positions: Tensor = self.starts + self.counts
        return positions

    def ended(self) -> Tensor:
        """int64 [Q]: the slots of prompts that end; the padding slot in place of the others."""
        return torch.where(self.ends > 0, self.slots, self._padding).long()

    def advance(self, sequence: SequenceState, first: Tensor) -> None:
        """Make the first tokens int32 [Q] the roots of the prompts that end."""
        ends, where = self.ends > 0, self.ended()
        # The padding slot may be written several times; it keeps its state.
        lengths = torch.where(ends, self.next_positions() + 1, 1)
        sequence.lengths.index_copy_(0, where, lengths)
        sequence.roots.index_copy_(0, where, torch.where(ends, first, 0))
