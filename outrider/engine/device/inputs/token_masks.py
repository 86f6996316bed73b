"""Allowed-token masks of a launch, uploaded for rows with a grammar.

R rows of logits, Q prefill chunks, C rows of bits, W words of 32 ids. Launches without sessions
with a grammar upload nothing, and their kernels do not read the masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.graphs.shapes import MAX_CHUNKS, MAX_TOKEN_ROWS
from outrider.engine.device.inputs.round_inputs import int32_zeros
from outrider.engine.device.transfer.uploads import upload_int32s
from outrider.engine.kernels.session_tensors import AllowedTokenBits

Masks = NDArray[np.uint32]
"""[n, W], id i is bit i % 32 of word i // 32."""


def mask_bytes(max_sessions: int, max_nodes: int, in_process_nodes: int, vocab_size: int) -> int:
    """Memory of `AllowedTokenMasks`."""
    rows, words = _rows(max_sessions, max_nodes, in_process_nodes), -(-vocab_size // 32)
    return 4 * words * (_first(rows, words) + rows)


def _rows(max_sessions: int, max_nodes: int, in_process_nodes: int) -> int:
    """R + Q: rows of a launch that may have bits."""
    decoding = max(min(max_sessions * max_nodes, MAX_TOKEN_ROWS), max_nodes)
    # Launches with in-process drafts are not split.
    return max(decoding, max_sessions * in_process_nodes) + MAX_CHUNKS


def _first(rows: int, words: int) -> int:
    """The first row of bits that is uploaded with a launch."""
    return 1 + -(-rows // words)


class AllowedTokenMasks:
    """Static mask tensors, filled before a launch in stream order: one upload holds the offset of
    each row's bits, then the bits."""

    def __init__(
        self,
        *,
        max_sessions: int,
        max_nodes: int,
        in_process_nodes: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`max_nodes`: of a row, the root included; `in_process_nodes`: of one with in-process
        drafts, 0 if there are none."""
        rows, words = _rows(max_sessions, max_nodes, in_process_nodes), -(-vocab_size // 32)
        self._first = _first(rows, words)
        bits = int32_zeros((self._first + rows) * words, device).view(-1, words)
        with torch.inference_mode(False):
            # The first row of bits is for rows that nobody looks at; places stand in the next ones.
            bits[0] = -1
        self._told = bits[1:].view(-1)
        self._places, places = rows, self._told[:rows]
        self.chunks = AllowedTokenBits(bits, places[:MAX_CHUNKS])
        """By prefill chunk."""
        self.decoding = AllowedTokenBits(bits, places[MAX_CHUNKS:])
        """By row of logits of the sessions that decode."""

    def fill_masks(
        self, rows: Sequence[Masks | None], nodes: int, chunks: Sequence[Masks | None]
    ) -> None:
        """Rows of a launch, each with the masks of its root and nodes, `nodes` being those that the
        launch has for every row; and prefill chunks, each with the mask of what follows it. None:
        the session is in no grammar, or nobody looks."""
        given = [masks for masks in (*rows, *chunks) if masks is not None]
        if not given:
            return
        words = self.decoding.bits.shape[1]
        header = np.zeros((self._first - 1) * words, dtype=np.int32)
        ends = header[:MAX_CHUNKS]
        decoding = header[MAX_CHUNKS : self._places]
        index = decoding[: len(rows) * nodes].reshape(len(rows), nodes)
        place = self._first
        for row, masks in enumerate(rows):
            if masks is not None:
                index[row, : len(masks)] = np.arange(place, place + len(masks))
                place += len(masks)
        for chunk, masks in enumerate(chunks):
            if masks is not None:
                ends[chunk] = place
                place += 1
        told = self._told[: (place - 1) * words]
        upload_int32s(told, header, *(masks.view(np.int32) for masks in given))
