"""Allowed-token masks of a launch, uploaded for rows with a grammar.

Shapes: R rows of logits, Q prefill chunks, W words of 32 ids each. Launches without sessions with a
grammar upload nothing, and their kernels do not read the masks.
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
"""[n, W]: allowed-token masks; id i is bit i % 32 of word i // 32."""


def mask_bytes(max_sessions: int, max_nodes: int, in_process_nodes: int, vocab_size: int) -> int:
    """Return the number of bytes of device memory that `AllowedTokenMasks` needs with these
    arguments."""
    rows, words = _rows(max_sessions, max_nodes, in_process_nodes), -(-vocab_size // 32)
    return 4 * words * (_first(rows, words) + rows)


def _rows(max_sessions: int, max_nodes: int, in_process_nodes: int) -> int:
    """Return R + Q, the number of rows of a launch that may have masks."""
    decoding = max(min(max_sessions * max_nodes, MAX_TOKEN_ROWS), max_nodes)
    # Launches with in-process drafts are not split.
    return max(decoding, max_sessions * in_process_nodes) + MAX_CHUNKS


def _first(rows: int, words: int) -> int:
    """Return the index of the first row of bits after the row offsets."""
    return 1 + -(-rows // words)


class AllowedTokenMasks:
    """Static mask tensors on the device, filled before a launch in stream order. One upload
    contains the index of the mask of each row of logits, followed by the masks."""

    def __init__(
        self,
        *,
        max_sessions: int,
        max_nodes: int,
        in_process_nodes: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`max_nodes`: maximum number of nodes of a row, including the root. `in_process_nodes`:
        nodes of a row with in-process drafts; 0 without an in-process drafter."""
        rows, words = _rows(max_sessions, max_nodes, in_process_nodes), -(-vocab_size // 32)
        self._first = _first(rows, words)
        bits = int32_zeros((self._first + rows) * words, device).view(-1, words)
        with torch.inference_mode(False):
            # The first row of bits allows all tokens, for rows without a mask. Row offsets
            # follow.
            bits[0] = -1
        self._device_words = bits[1:].view(-1)
        self._places, places = rows, self._device_words[:rows]
        self.chunks = AllowedTokenBits(bits, places[:MAX_CHUNKS])
        """Masks for the logits of prefill chunks, indexed by chunk."""
        self.decoding = AllowedTokenBits(bits, places[MAX_CHUNKS:])
        """Masks for the logits of decoding sessions, indexed by row of logits."""

    def fill_masks(
        self, rows: Sequence[Masks | None], nodes: int, chunks: Sequence[Masks | None]
    ) -> None:
        """Upload the masks of a launch. Does nothing if there are none.

        rows: for each decoding row, the masks of the tokens after its root and after each node, or
        None for a session without a grammar. nodes: number of nodes of every row of the launch,
        including the root. chunks: for each prefill chunk, the mask of the token after it, or None
        if no mask is needed.
        """
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
        target = self._device_words[: (place - 1) * words]
        upload_int32s(target, header, *(masks.view(np.int32) for masks in given))
