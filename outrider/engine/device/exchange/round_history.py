"""RoundHistory: what a device says of its rounds, each round once."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kernels.exchange.buffers import ROUND_TIMES

READ_EVERY_S: Final = 0.05
"""A history is to be read so often: fewer rounds are run in this time than a device keeps."""
_NUMBER: Final = ROUND_TIMES.index("number")


class RoundHistory:
    """Reads the history of one side of an exchange, which its device writes at any time."""

    def __init__(self, history: NDArray[np.int64]) -> None:
        """`history`: [ROUNDS_KEPT, 10], see `ExchangeState`."""
        self._history = history
        self._last = 0

    def take_rows(self) -> NDArray[np.int64]:
        """The rows [n, 10] of the rounds since the last call, oldest first, as far as they are
        kept."""
        rows = self._history.copy()
        numbers = rows[:, _NUMBER]
        # Behind the copy: a row that the device was writing at that time has not its number yet.
        rows = rows[(numbers == self._history[:, _NUMBER]) & (numbers > self._last)]
        ordered: NDArray[np.int64] = rows[np.argsort(rows[:, _NUMBER])]
        if len(ordered):
            self._last = int(ordered[-1, _NUMBER])
        return ordered

    def forget(self) -> None:
        """Begin anew: numbers of another exchange follow."""
        self._history[:] = 0
        self._last = 0
