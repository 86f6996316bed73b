"""RoundHistory: reads the times that a device records of its rounds, each round once."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kernels.exchange.buffers import ROUND_TIMES

READ_EVERY_S: Final = 0.05
"""Maximum interval in seconds between two reads of a history. No round is missed, because a device
runs fewer rounds in this time than the history has rows."""
_NUMBER: Final = ROUND_TIMES.index("number")


class RoundHistory:
    """Reads the round times of one side of an exchange, which its device may write at any time."""

    def __init__(self, history: NDArray[np.int64]) -> None:
        """`history`: [ROUNDS_KEPT, 10], see `ExchangeState`."""
        self._history = history
        self._last = 0

    def take_rows(self) -> NDArray[np.int64]:
        """Return the history rows, int64 [n, 10], of the rounds since the last call, oldest first.
        Rows that newer rounds have overwritten are missing."""
        rows = self._history.copy()
        numbers = rows[:, _NUMBER]
        # Behind the copy: a row that the device was writing at that time has not its number yet.
        rows = rows[(numbers == self._history[:, _NUMBER]) & (numbers > self._last)]
        ordered: NDArray[np.int64] = rows[np.argsort(rows[:, _NUMBER])]
        if len(ordered):
            self._last = int(ordered[-1, _NUMBER])
        return ordered

    def forget(self) -> None:
        """Clear the history. Call this before the rounds of another exchange."""
        self._history[:] = 0
        self._last = 0
