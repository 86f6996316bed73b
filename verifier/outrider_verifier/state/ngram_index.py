"""N-gram index of a session's own tokens: finds what followed its last tokens before. Pure.

Acceptance is measured without verifying: the continuation that a lookup finds for a prefix is
compared with what the next round emits, whatever draft that round verified.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MATCH_TOKENS: Final = 3
"""Tokens that must have occurred before."""
MAX_INDEXED_TOKENS: Final = 4096
"""Tokens of a text that is met for the first time, from its end, that are looked at."""
ACCEPTANCE_EMA_WEIGHT: Final = 1.0 / 12.0
"""What one more token weighs against all before it."""
PRIOR_ACCEPTANCE: Final = 0.3
"""How often a token of a lookup comes true, before anything is known."""
_WIDTH: Final = 21
"""Bits of a token id."""


class NgramIndex:
    """Last position of each token trigram of a text, and the measured acceptance of lookups."""

    __slots__ = ("_end", "_places", "rate")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Of each three tokens, packed, the place of the last one; something follows it."""
        self._end = 0
        """Tokens that were followed."""
        self.rate = PRIOR_ACCEPTANCE
        """How often the next token of a lookup came true, if those before it did."""

    def update(self, tokens: NDArray[np.int32], length: int) -> None:
        """The text is `tokens[:length]` now; what is new is compared with what was expected."""
        if self._end:
            self._compare(tokens, length)
        first = max(self._end - 1, MATCH_TOKENS - 1, length - MAX_INDEXED_TOKENS)
        if first < length - 1:
            ids = tokens[first - MATCH_TOKENS + 1 : length - 1].astype(np.int64)
            keys = (ids[:-2] << 2 * _WIDTH) | (ids[1:-1] << _WIDTH) | ids[2:]
            self._places.update(zip(keys.tolist(), range(first, length - 1), strict=True))
        self._end = length

    def propose(
        self, tokens: NDArray[np.int32], length: int, most: int
    ) -> NDArray[np.int32] | None:
        """Up to `most` tokens, as those that followed the last three of `tokens[:length]` when they
        were seen before; a period goes on. None if they were not."""
        place = self._position(tokens, length) if most > 0 else None
        if place is None:
            return None
        found: NDArray[np.int32] = tokens[place + 1 + np.arange(most) % (length - 1 - place)]
        return found

    def acceptance_by_depth(self, depth: int) -> NDArray[np.float64]:
        """float64 [depth]: P(the token of depth d of a draft stands)."""
        return np.power(self.rate, np.arange(1, depth + 1, dtype=np.float64))

    def _position(self, tokens: NDArray[np.int32], length: int) -> int | None:
        if length < MATCH_TOKENS:
            return None
        first, second, third = tokens[length - MATCH_TOKENS : length].tolist()
        return self._places.get((first << 2 * _WIDTH) | (second << _WIDTH) | third)

    def _compare(self, tokens: NDArray[np.int32], length: int) -> None:
        said = self.propose(tokens, self._end, length - self._end)
        if said is None:
            return
        for foretold, came in zip(said.tolist(), tokens[self._end : length].tolist(), strict=True):
            self.rate += ACCEPTANCE_EMA_WEIGHT * ((foretold == came) - self.rate)
            if foretold != came:
                # What lies behind the first difference was not tried.
                break


class NgramFallbackState:
    """A session's lookup, beside what its drafter gives it."""

    __slots__ = ("better", "drafters", "lookup")

    def __init__(self) -> None:
        self.lookup = NgramIndex()
        self.drafters: float | None = None
        """Tokens that a round with its drafter's draft emits, in the mean; None: not known."""
        self.better = False
        """Whether a lookup is expected to emit more."""
