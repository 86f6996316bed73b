"""Newest draft rows of every session, kept on the device as input of later drafts.

Shapes: X session slots, at most R rows of a session, B sessions of a pass, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.slots.session_slots import DeviceSessionSlots


class RecentRows:
    """Static tensors with the newest draft rows of each session slot, written and read in stream
    order."""

    def __init__(
        self, slots: DeviceSessionSlots, *, max_rows: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._slots = slots
        tables = slots.sequence.tables
        size = (tables.shape[0], max_rows, hidden_size)
        self._features = torch.zeros(size, dtype=dtype, device=tables.device)
        """[X, R, H]: features of the kept rows."""
        self._words = torch.zeros((size[0], 2 + max_rows), dtype=torch.int32, device=tables.device)
        """Number of kept rows, their first position, and their tokens, int32 [X, 2 + R]."""

    def store_rows(self, rows: NewRows) -> None:
        """Replace the stored rows of each session in `rows` by its new rows."""
        slots, width = rows.slots.long(), rows.tokens.shape[1]
        self._features[:, :width].index_copy_(0, slots, rows.features.to(self._features.dtype))
        words = torch.cat((rows.counts[:, None], rows.starts[:, None], rows.tokens), dim=1)
        self._words[:, : 2 + width].index_copy_(0, slots, words.int())

    def rows_of(self, slots: Tensor) -> NewRows:
        """Return the stored draft rows of these slots, int32 [B]."""
        words = self._words[slots.long()]
        # Kernels need contiguous vectors and matrices.
        return NewRows(
            slots=slots,
            tables=self._slots.sequence.tables,
            tokens=words[:, 2:].contiguous(),
            features=self._features[slots.long()],
            counts=torch.where(slots != self._slots.padding, words[:, 0], 0),
            starts=words[:, 1].contiguous(),
        )

    def newest_positions(self, slots: Tensor) -> Tensor:
        """Return the draft position of the last stored row of each slot, int32 [B]."""
        words = self._words[slots.long()]
        return words[:, 1] + words[:, 0].clamp(min=1) - 1
