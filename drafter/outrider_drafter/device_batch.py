"""The rows of a draft batch on their way to the device.

B rows of a bucket, R new rows a session, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.buffers import Uploader
from outrider.engine.device.draft import NewRows
from outrider.engine.device.shapes import ROW_BUCKETS, bucket
from outrider_drafter.device_rows import DeviceRows
from outrider_drafter.sessions import Session

NEW_ROW_BUCKETS: Final = (4, 8, 16)
"""Rows of a catch-up that is part of a draft; longer ones are written ahead."""
MAX_BATCH: Final = 64
"""Sessions of one launch."""


@dataclass(slots=True, eq=False)
class SessionRows:
    """What is kept of a session: its K/V, and the features from the last stable row on."""

    slot: int
    """-1 once the session is shut."""
    features: Tensor
    """[m, H] on the host: of the last stable row, if there is one, then of rows to be written."""
    stable: int = 0
    """K/V rows made from real features."""

    @property
    def shut(self) -> bool:
        """Whether the session is not followed any more."""
        return self.slot < 0

    @property
    def fresh(self) -> int:
        """Features of rows that are not stable yet."""
        return self.features.shape[0] - (1 if self.stable else 0)


class Ready(NamedTuple):
    """A session with its new rows, the live one last."""

    session: Session
    state: SessionRows
    tokens: NDArray[np.int32]
    features: Tensor
    start: int


class DraftBatch:
    """Static inputs of a launch, filled from the host by one upload each of words and features."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        rows = bucket(MAX_BATCH, ROW_BUCKETS) * NEW_ROW_BUCKETS[-1]
        size = 3 * bucket(MAX_BATCH, ROW_BUCKETS) + rows
        self._hidden = hidden
        self._words = torch.zeros(size, dtype=torch.int32, device=device)
        self._uploader = Uploader(size, device)
        self._features = torch.zeros(rows * hidden, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._staged = torch.zeros(rows * hidden, dtype=dtype, pin_memory=pinned)

    def fill(self, members: Sequence[Ready], size: int, num_rows: int, rows: DeviceRows) -> NewRows:
        """Upload a batch in a bucket; rows without a member are the padding slot's.

        The staging memory is free again: every launch is waited for before the next one.
        """
        head = np.zeros((3, size), dtype=np.int32)
        head[0] = rows.padding
        tokens = np.full((size, num_rows), -1, dtype=np.int32)
        cells = size * num_rows
        staged = self._staged[: cells * self._hidden].view(size, num_rows, self._hidden)
        for row, ready in enumerate(members):
            count = len(ready.tokens)
            head[:, row] = ready.state.slot, count, ready.start
            tokens[row, :count] = ready.tokens
            staged[row, :count] = ready.features
        words = self._words[: 3 * size + cells]
        self._uploader.upload(np.concatenate((head.ravel(), tokens.ravel())), words)
        features = self._features[: cells * self._hidden].view(size, num_rows, self._hidden)
        features.copy_(staged, non_blocking=True)
        slots, counts, starts = words[: 3 * size].view(3, size).unbind()
        return NewRows(
            slots=slots,
            tables=rows.tables,
            tokens=words[3 * size :].view(size, num_rows),
            features=features,
            counts=counts,
            starts=starts,
        )
