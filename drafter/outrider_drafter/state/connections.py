"""Which sessions each connection announced, and by what handles."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class ConnectionSessions:
    """The sessions that one connection announced."""

    slots: Indices = field(default_factory=lambda: np.full(64, -1, dtype=np.int64))
    """By handle; -1: none."""
    count: int = 0

    def find_slots(self, handles: Indices) -> Indices:
        """The slots of these handles, any numbers >= 0; -1 for those without."""
        known = handles < len(self.slots)
        return np.where(known, self.slots[np.where(known, handles, 0)], -1)

    def set_slot(self, handle: int, slot: int) -> None:
        """Note the session of a handle."""
        if handle >= len(self.slots):
            grown = np.full(max(handle + 1, 2 * len(self.slots)), -1, dtype=np.int64)
            grown[: len(self.slots)] = self.slots
            self.slots = grown
        self.slots[handle] = slot
        self.count += 1
