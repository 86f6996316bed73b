"""A session's own text as a drafter: what followed its last tokens before (pure).

How often that comes true is learnt without verifying any of it: what a lookup says of a prefix is
compared with what the round behind that prefix emits, whatever was drafted for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MATCH: Final = 3
"""Tokens that must have occurred before."""
REACH: Final = 4096
"""Tokens of a text that is met for the first time, from its end, that are looked at."""
GAIN: Final = 1.0 / 12.0
"""What one more token weighs against all before it."""
FIRST_RATE: Final = 0.3
"""How often a token of a lookup comes true, before anything is known."""
_WIDTH: Final = 21
"""Bits of a token id."""


class Lookup:
    """Where each three tokens of a text were seen last, and how often that foretold what came."""

    __slots__ = ("_end", "_places", "rate")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Of each three tokens, packed, the place of the last one; something follows it."""
        self._end = 0
        """Tokens that were followed."""
        self.rate = FIRST_RATE
        """How often the next token of a lookup came true, if those before it did."""

    def follow(self, tokens: NDArray[np.int32], length: int) -> None:
        """The text is `tokens[:length]` now; what is new is compared with what was expected."""
        if self._end:
            self._compare(tokens, length)
        first = max(self._end - 1, MATCH - 1, length - REACH)
        if first < length - 1:
            ids = tokens[first - MATCH + 1 : length - 1].astype(np.int64)
            keys = (ids[:-2] << 2 * _WIDTH) | (ids[1:-1] << _WIDTH) | ids[2:]
            self._places.update(zip(keys.tolist(), range(first, length - 1), strict=True))
        self._end = length

    def draft(self, tokens: NDArray[np.int32], length: int, most: int) -> NDArray[np.int32] | None:
        """Up to `most` tokens, as those that followed the last three of `tokens[:length]` when they
        were seen before; a period goes on. None if they were not."""
        place = self._place(tokens, length) if most > 0 else None
        if place is None:
            return None
        found: NDArray[np.int32] = tokens[place + 1 + np.arange(most) % (length - 1 - place)]
        return found

    def reached(self, depth: int) -> NDArray[np.float64]:
        """float64 [depth]: P(the token of depth d of a draft stands)."""
        return np.power(self.rate, np.arange(1, depth + 1, dtype=np.float64))

    def _place(self, tokens: NDArray[np.int32], length: int) -> int | None:
        if length < MATCH:
            return None
        first, second, third = tokens[length - MATCH : length].tolist()
        return self._places.get((first << 2 * _WIDTH) | (second << _WIDTH) | third)

    def _compare(self, tokens: NDArray[np.int32], length: int) -> None:
        said = self.draft(tokens, self._end, length - self._end)
        if said is None:
            return
        for foretold, came in zip(said.tolist(), tokens[self._end : length].tolist(), strict=True):
            self.rate += GAIN * ((foretold == came) - self.rate)
            if foretold != came:
                # What lies behind the first difference was not tried.
                break


class StandIn:
    """A session's lookup, beside what its drafter gives it."""

    __slots__ = ("better", "drafters", "lookup")

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.drafters: float | None = None
        """Tokens that a round with its drafter's draft emits, in the mean; None: not known."""
        self.better = False
        """Whether a lookup is expected to emit more."""
