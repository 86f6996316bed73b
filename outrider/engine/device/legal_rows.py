"""What grammars allow at the rows of a launch: bits that are uploaded for the rows that have any.

R rows of logits, C rows of bits, W words of 32 ids. Launches without sessions in a grammar upload
nothing, and their kernels read nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.inputs import zeros
from outrider.engine.device.shapes import MOST_TOKEN_ROWS, PIECE_BUCKETS
from outrider.engine.device.uploads import upload
from outrider.engine.kernels.state import LegalBits

Masks = NDArray[np.uint32]
"""[n, W], id i is bit i % 32 of word i // 32."""


def legal_bytes(max_sessions: int, max_nodes: int, own_nodes: int, vocab_size: int) -> int:
    """Memory of `LegalRows`."""
    return 4 * _rows(max_sessions, max_nodes, own_nodes) * -(-vocab_size // 32)


def _rows(max_sessions: int, max_nodes: int, own_nodes: int) -> int:
    """Rows of bits of a launch: one is for rows that nobody looks at."""
    decoding = max(min(max_sessions * max_nodes, MOST_TOKEN_ROWS), max_nodes)
    # Launches with own drafts are not split.
    return 1 + max(decoding, max_sessions * own_nodes) + PIECE_BUCKETS[-1]


class LegalRows:
    """Static tensors of what is legal, filled before a launch, in the order of the stream."""

    def __init__(
        self,
        *,
        max_sessions: int,
        max_nodes: int,
        own_nodes: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`max_nodes`: of a row, the root included; `own_nodes`: of one with own drafts, 0 if there
        are none."""
        rows = _rows(max_sessions, max_nodes, own_nodes)
        words = -(-vocab_size // 32)
        bits = zeros(rows * words, device).view(rows, words)
        with torch.inference_mode(False):
            bits[0] = -1
        self.decoding = LegalBits(bits, zeros(rows, device))
        """By row of logits of the sessions that decode."""
        self.pieces = LegalBits(bits, zeros(PIECE_BUCKETS[-1], device))
        """By piece."""

    def fill(
        self, rows: Sequence[Masks | None], nodes: int, pieces: Sequence[Masks | None]
    ) -> None:
        """Rows of a launch, each with the masks of its root and nodes, `nodes` being those that the
        launch has for every row; and pieces, each with the mask of what follows it. None: the
        session is in no grammar, or nobody looks."""
        given = [masks for masks in (*rows, *pieces) if masks is not None]
        if not given:
            return
        words = np.concatenate(given).view(np.int32)
        bits = self.decoding.bits
        upload(words.reshape(-1), bits[1 : 1 + len(words)].view(-1))
        place = 1
        if any(masks is not None for masks in rows):
            index = np.zeros((len(rows), nodes), dtype=np.int32)
            for row, masks in enumerate(rows):
                if masks is not None:
                    index[row, : len(masks)] = np.arange(place, place + len(masks))
                    place += len(masks)
            upload(index.reshape(-1), self.decoding.places[: index.size])
        if any(masks is not None for masks in pieces):
            ends = np.zeros(len(pieces), dtype=np.int32)
            for piece, masks in enumerate(pieces):
                if masks is not None:
                    ends[piece] = place
                    place += 1
            upload(ends, self.pieces.places[: len(ends)])
