"""What a device holds of each session that it drafts for (no tensors)."""

from __future__ import annotations

from typing import Final

import numpy as np

from outrider.spec.plan import Plan
from outrider_drafter.device_shapes import Shape

UNSEATED: Final = -1


class Seats:
    """What the device holds of each session; columns by slot of the session table."""

    def __init__(self) -> None:
        self.seats = np.empty(0, dtype=np.int64)
        """[X]: slot of `DeviceRows`; -1 without one."""
        self.stable = np.empty(0, dtype=np.int64)
        """[X]: K/V rows made from real features."""
        self.room = np.empty(0, dtype=np.int64)
        """[X]: rows that there are blocks for."""
        self.counted = np.empty(0, dtype=np.int64)
        """[X]: tokens that the device's penalties know of."""
        self.shapes: list[tuple[Plan, Shape] | None] = []
        """[X]: what is grown while the plan is this one and there is room for it."""

    def cover(self, slots: int) -> None:
        """Have columns for this many slots."""
        more = slots - len(self.seats)
        if more > 0:
            self.seats = np.concatenate((self.seats, np.full(more, UNSEATED)))
            self.stable = np.concatenate((self.stable, np.zeros(more, dtype=np.int64)))
            self.room = np.concatenate((self.room, np.zeros(more, dtype=np.int64)))
            self.counted = np.concatenate((self.counted, np.zeros(more, dtype=np.int64)))
            self.shapes += [None] * more
