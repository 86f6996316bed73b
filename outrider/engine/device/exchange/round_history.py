"""RoundHistory: reads the times that a device records of its rounds, each round once."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kernels.exchange.buffers import ROUND_TIMES

READ_EVERY_S: Final = 0.05
"""Interval in seconds at which a history must be read. A device runs fewer rounds in this time than
it keeps."""
_NUMBER: Final = ROUND_TIMES.index("number")


class RoundHistory:
    """Reads the round times of one side of an exchange, which its device may write at any time."""

    def __init__(self, history: NDArray[np.int64]) -> None:
        """`history`: [ROUNDS_KEPT, 10], see `ExchangeState`."""
        self._history = history
        self._last = 0

    def take_rows(self) -> NDArray[np.int64]:
        """Return the rows [n, 10] of the rounds since the last call, oldest first, as far as they
        are kept."""
        rows = self._history.copy()
        numbers = rows[:, _NUMBER]
        # Behind the copy: a row that the device was writing at that time has not its number yet.
        rows = rows[(numbers == self._history[:, _NUMBER]) & (numbers > self._last)]
        ordered: NDArray[np.int64] = rows[np.argsort(rows[:, _NUMBER])]
        if len(ordered):
            self._last = int(ordered[-1, _NUMBER])
        return ordered

    def forget(self) -> None:
        """Reset the history, before the rounds of another exchange."""
        self._history[:] = 0
        self._last = 0
