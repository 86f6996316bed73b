"""The rows of a draft batch on their way to the device.

B rows of a bucket, R new rows a session, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.draft import NewRows
from outrider.engine.warper import has_penalties
from outrider.spec.sampling import Rule
from outrider_drafter.device_rows import DeviceRows
from outrider_drafter.device_shapes import BATCH_SIZES
from outrider_drafter.head_following import raw_array
from outrider_drafter.sessions import Session
from outrider_drafter.table import SessionTable

NEW_ROW_BUCKETS: Final = (4, 8, 16)
"""Rows of a catch-up that is part of a draft; longer ones are written ahead."""
_ALIGNMENT: Final = 256
"""Bytes; kernels read features in wide pieces."""


class Members(NamedTuple):
    """Sessions of one launch, and what stays as it is from draft to draft; columns [B]."""

    table: SessionTable
    sessions: Sequence[Session]
    slots: NDArray[np.int64]
    """Rows of the table."""
    seats: NDArray[np.int64]
    """Slots of `DeviceRows`."""
    wanted: NDArray[np.int64]
    """Nodes that their plans ask for."""
    penalised: bool
    """Whether tokens of any are counted for its penalties."""
    general: bool
    """Whether any session warps its logits, or grows its tree by shared noise."""

    @classmethod
    def of(cls, sessions: Sequence[Session], seats: NDArray[np.int64], rows: DeviceRows) -> Members:
        """Seated sessions; `seats` [X] by slot of the table."""
        slots = np.array([session.slot for session in sessions], dtype=np.int64)
        return cls(
            table=sessions[0].table,
            sessions=sessions,
            slots=slots,
            seats=seats[slots],
            wanted=np.array([session.plan.draft_tokens for session in sessions], dtype=np.int64),
            penalised=any(has_penalties(session.sampling) for session in sessions),
            general=any(map(rows.warp.warps, seats[slots].tolist()))
            or any(map(_shares_noise_in_trees, sessions)),
        )


class Ready(NamedTuple):
    """Sessions with their new rows, the live one last in each; int64 columns [B]."""

    members: Members
    starts: NDArray[np.int64]
    """First new row."""
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


def _shares_noise_in_trees(session: Session) -> bool:
    return session.plan.top_k > 1 and session.sampling.effective_rule is Rule.COUPLED


class _Bucket(NamedTuple):
    """The batch's memory as one bucket sees it; the first five are what `rows` is uploaded from."""

    head: NDArray[np.int32]
    """[3, B]: slots, counts, starts."""
    tokens: NDArray[np.int32]
    """[B, R]."""
    features: NDArray[np.generic]
    """[B, R, H]."""
    staged: Tensor
    """All of these as bytes."""
    uploaded: Tensor
    rows: NewRows


class DraftBatch:
    """Static inputs of a launch, filled from the host by one upload.

    Words end where features begin, whatever the bucket: so what is uploaded is one piece, and an
    unused row holds features, which are finite, not words.
    """

    def __init__(
        self, rows: DeviceRows, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        most = BATCH_SIZES[-1]
        cells = most * NEW_ROW_BUCKETS[-1]
        self._rows, self._hidden, self._dtype = rows, hidden, dtype
        self._border = -(-4 * (3 * most + cells) // _ALIGNMENT) * _ALIGNMENT
        size = self._border + cells * hidden * dtype.itemsize
        self._uploaded = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._staged = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def fill(self, ready: Ready | None, size: int, num_rows: int) -> NewRows:
        """Upload a batch in a bucket; rows without a session are the padding slot's.

        The features are read from the messages that brought them. The staging memory is free
        again: every launch is waited for before the next one.
        """
        place = self._buckets.get((size, num_rows))
        if place is None:
            place = self._buckets[size, num_rows] = self._bucket(size, num_rows)
        count = 0 if ready is None else len(ready)
        place.head[0, count:] = self._rows.padding
        place.head[1:, count:] = 0
        place.tokens[count:] = -1
        if ready is not None:
            table, slots = ready.members.table, ready.members.slots
            place.head[0, :count] = ready.members.seats
            place.head[1, :count] = ready.counts
            place.head[2, :count] = ready.starts
            within = np.arange(num_rows)
            known = np.minimum(ready.starts[:, None] + 1 + within, table.tokens.shape[1] - 1)
            tokens = table.tokens[slots[:, None], known]
            place.tokens[:count] = np.where(within < ready.counts[:, None], tokens, -1)
            table.features.gather(slots, ready.starts, ready.counts, place.features[:count])
        place.uploaded.copy_(place.staged, non_blocking=True)
        return place.rows

    def newest(self, ready: Ready, size: int, num_rows: int) -> NDArray[np.generic]:
        """The rows [B, R, H] that `fill` staged; valid until it is called again."""
        return self._buckets[size, num_rows].features[: len(ready)]

    def _bucket(self, size: int, num_rows: int) -> _Bucket:
        cells = size * num_rows
        start = self._border - 4 * (3 * size + cells)
        end = self._border + cells * self._hidden * self._dtype.itemsize

        def split(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            words = memory[start : self._border].view(torch.int32)
            features = memory[self._border : end].view(self._dtype)
            return (
                words[: 3 * size].view(3, size),
                words[3 * size :].view(size, num_rows),
                features.view(size, num_rows, self._hidden),
            )

        head, tokens, features = split(self._staged)
        on_device = split(self._uploaded)
        slots, counts, starts = on_device[0].unbind()
        return _Bucket(
            head=head.numpy(),
            tokens=tokens.numpy(),
            features=raw_array(features),
            staged=self._staged[start:end],
            uploaded=self._uploaded[start:end],
            rows=NewRows(
                slots=slots,
                tables=self._rows.tables,
                tokens=on_device[1],
                features=on_device[2],
                counts=counts,
                starts=starts,
            ),
        )
