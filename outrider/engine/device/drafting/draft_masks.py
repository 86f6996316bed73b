"""Allowed-token masks for in-process drafts of sessions with a grammar.

Level i consists of the draft tokens at depth i, counted from 0.

Shapes: L levels that can be masked, B rows of a launch, W words of 32 target ids each, Vd draft
vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.inputs.round_inputs import int32_zeros
from outrider.engine.device.transfer.buffers import Uploader
from outrider.engine.device.transfer.uploads import upload_int32s
from outrider.engine.kernels.drafts.token_masks import mask_drafts
from outrider.engine.kernels.session_tensors import AllowedTokenBits

Masks = NDArray[np.uint32]
"""Masks of one row, [at most L, W]: one mask for each of the first levels, with a set bit for each
target id that may be drafted. Later levels are not masked."""


class DraftTokenMasks:
    """Static mask tensors on the device. `set_masks` fills them before a launch, in stream order.
    Launches without masked drafts upload nothing."""

    def __init__(
        self,
        *,
        levels: int,
        max_rows: int,
        vocab_size: int,
        target_ids: Tensor,
        device: torch.device,
        num_beside: int = 0,
        ring: int = 0,
    ) -> None:
        """`target_ids`: int [Vd], the target ids of the draft vocabulary. `num_beside`: maximum
        number of int32 words of other data that `set_masks` uploads together with the masks.
        `ring`: maximum number of uploads in progress; 0 for no limit."""
        self.levels = levels
        self.words = -(-vocab_size // 32)
        drafted = np.zeros(32 * self.words, dtype=np.bool_)
        drafted[target_ids.cpu().numpy()] = True
        self._drafted = np.packbits(drafted, bitorder="little").view("<u4").astype(np.uint32)
        # Row 0 of the bits stands for "not masked". The indices into the bits are in the rows
        # after it.
        self._first = 1 + -(-(levels * max_rows + num_beside) // self.words)
        size = (self._first + levels * max_rows) * self.words
        self._bits = int32_zeros(size, device).view(-1, self.words)
        self._device_words = self._bits[1:].view(-1)
        self._places = self._device_words[: levels * max_rows]
        self.beside = self._device_words[levels * max_rows : levels * max_rows + num_beside]
        """int32 [num_beside]: the other data of the last `set_masks` call that had such data."""
        self._uploads = Uploader(self._device_words.numel(), device, ring=ring) if ring else None
        self._masked = False
        """Whether any row of the last `set_masks` call was masked."""

    def apply_masks(self, logits: Tensor, level: int, ids: Tensor) -> Tensor:
        """Return the logits [B, Vd] of a level, with -inf for tokens that its masks forbid.

        ids: int64 [Vd], the target id of each column. The result is float32, and float32 logits are
        changed in place. Logits of levels that cannot be masked are returned unchanged.
        """
        if level >= self.levels:
            return logits
        rows, logits = len(logits), logits.to(torch.float32)
        places = self._places[level * rows : (level + 1) * rows]
        mask_drafts(logits, AllowedTokenBits(self._bits, places), ids)
        return logits

    def has_token(self, token: int) -> bool:
        """Return whether a target id is in the draft vocabulary."""
        return bool(int(self._drafted[token >> 5]) >> (token & 31) & 1)

    def set_masks(
        self,
        masks: Sequence[Masks | None],
        rows: int,
        beside: NDArray[np.int32] | None = None,
    ) -> None:
        """Upload the masks for the next launch.

        `masks`: the masks of each row, None for a row without masks. A level is not masked if no
        mask is given for it or if its mask allows no token of the draft vocabulary. `rows`: number
        B of rows of the launch, at least len(masks). `beside`: int32 [at most num_beside], other
        data to upload with the masks.
        """
        given = [mask for each in masks if each is not None for mask in each[: self.levels]]
        known = np.bitwise_or.reduce(np.stack(given) & self._drafted, axis=1) if given else ()
        masks_left, bits = iter(zip(given, known, strict=True)), list[NDArray[np.int32]]()
        header = np.zeros((self._first - 1) * self.words, dtype=np.int32)
        places = header[: self.levels * rows].reshape(self.levels, rows)
        for row, each in enumerate(masks):
            for level in range(0 if each is None else min(len(each), self.levels)):
                mask, known_ids = next(masks_left)
                if known_ids:
                    places[level, row] = self._first + len(bits)
                    bits.append(mask.view(np.int32))
        if beside is not None:
            start = len(self._places)
            header[start : start + len(beside)] = beside
        if bits or self._masked or beside is not None:
            self._send(header, bits)
        self._masked = bool(bits)

    def _send(self, header: NDArray[np.int32], bits: Sequence[NDArray[np.int32]]) -> None:
        target = self._device_words[: header.size + len(bits) * self.words]
        if self._uploads is None:
            upload_int32s(target, header, *bits)
            return
        staged = self._uploads.stage_int32s()
        staged[: header.size] = header
        for place, words in enumerate(bits):
            start = header.size + place * self.words
            staged[start : start + self.words] = words
        self._uploads.start_upload(target)
