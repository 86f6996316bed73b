"""Messages of drafters that are kept for single entries, within a budget of memory (pure)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import Proposals


class KeptMessages:
    """Messages by number; each goes with its last entry, the oldest where all take too much."""

    def __init__(self, *, slots: int, budget_bytes: int) -> None:
        """`slots`: entries that are held at most, and so messages."""
        self._budget_bytes = budget_bytes
        self._messages: list[Proposals | None] = [None] * slots
        self._live = np.zeros(slots, dtype=np.int64)
        """Entries of each that are held."""
        self._free = list(range(slots))
        self._promises: dict[int, NDArray[np.float64]] = {}
        self._by_age: dict[int, None] = {}
        """Numbers in use, oldest first."""
        self.nbytes = 0
        """What all of them take."""

    def __len__(self) -> int:
        return len(self._by_age)

    def __getitem__(self, number: int) -> Proposals:
        message = self._messages[number]
        assert message is not None, number
        return message

    def promises(self, number: int) -> NDArray[np.float64]:
        """[S]: see `promises`; worked out once."""
        found = self._promises.get(number)
        if found is None:
            found = self._promises[number] = promises(self[number])
        return found

    def add(self, message: Proposals, entries: int) -> int:
        """Keep a message, of which so many entries are held; returns its number."""
        number = self._free.pop()
        self._messages[number] = message
        self._live[number] = entries
        self._by_age[number] = None
        self.nbytes += message.nbytes
        return number

    def drop(self, numbers: NDArray[np.int64]) -> None:
        """An entry is held no more of each of these messages [n]; they may repeat."""
        np.subtract.at(self._live, numbers, 1)
        for number in set(numbers.tolist()):
            if self._live[number]:
                continue
            self.nbytes -= self[number].nbytes
            self._messages[number] = None
            self._promises.pop(number, None)
            del self._by_age[number]
            self._free.append(number)

    @property
    def excess(self) -> int | None:
        """The message to forget next because all take too much; None: they do not. The newest one
        stays, whatever it takes."""
        if self.nbytes <= self._budget_bytes or len(self._by_age) < 2:
            return None
        return next(iter(self._by_age))


def promises(message: Proposals) -> NDArray[np.float64]:
    """[S]: draft tokens that the drafter expects to stand, the sum of the path probabilities; NaN
    for an entry with a draft law. A tree sampled from its law must not be chosen by its tokens'
    probabilities, for the choice would change the law: NaN is neither more nor less."""
    owners = np.arange(len(message)).repeat(message.node_counts)
    weights = np.exp(message.logprobs, dtype=np.float64)
    result = np.bincount(owners, weights, minlength=len(message)).astype(np.float64)
    if message.laws is not None:
        result[message.laws.given] = np.nan
    return result
