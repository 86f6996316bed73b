"""N-gram index of a session's own tokens: finds what followed its last tokens before.

Acceptance is measured without verifying: the continuation that a lookup finds for a prefix is
compared with what the next round emits, whatever draft that round verified. `NgramFallbackState`
holds the index of one session, and compares it with the session's drafter. No I/O and no clock.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MATCH_TOKENS: Final = 3
"""Length of the n-grams: this many last tokens must have occurred before."""
MAX_INDEXED_TOKENS: Final = 4096
"""Maximum number of tokens that one update indexes, counted from the end of the text."""
ACCEPTANCE_EMA_WEIGHT: Final = 1.0 / 12.0
"""Weight of a new token in the moving average of the acceptance rate."""
PRIOR_ACCEPTANCE: Final = 0.3
"""Acceptance rate of a lookup's tokens before any was compared."""
_WIDTH: Final = 21
"""Bits of a token id in a packed n-gram."""


class NgramIndex:
    """Last position of each token trigram of a text, and the measured acceptance of lookups."""

    __slots__ = ("_end", "_positions", "acceptance_rate")

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        """Position of the last token of each n-gram's latest occurrence, by the packed n-gram; the
        end of the text, which nothing follows, is not indexed."""
        self._end = 0
        """Length of the text at the last update."""
        self.acceptance_rate = PRIOR_ACCEPTANCE
        """Moving average of how often a token of a lookup matched, if those before it did."""

    def update(self, tokens: NDArray[np.int32], length: int) -> None:
        """Index the text `tokens[:length]`, after comparing its new tokens with a lookup of
        them."""
        if self._end:
            self._compare(tokens, length)
        first = max(self._end - 1, MATCH_TOKENS - 1, length - MAX_INDEXED_TOKENS)
        if first < length - 1:
            ids = tokens[first - MATCH_TOKENS + 1 : length - 1].astype(np.int64)
            keys = (ids[:-2] << 2 * _WIDTH) | (ids[1:-1] << _WIDTH) | ids[2:]
            self._positions.update(zip(keys.tolist(), range(first, length - 1), strict=True))
        self._end = length

    def propose(
        self, tokens: NDArray[np.int32], length: int, max_tokens: int
    ) -> NDArray[np.int32] | None:
        """Return up to `max_tokens` tokens that followed the latest earlier occurrence of the last
        n-gram of `tokens[:length]`; None without one. Where the found continuation reaches the end
        of the text, it is repeated periodically."""
        position = self._position(tokens, length) if max_tokens > 0 else None
        if position is None:
            return None
        period = length - 1 - position
        found: NDArray[np.int32] = tokens[position + 1 + np.arange(max_tokens) % period]
        return found

    def acceptance_by_depth(self, depth: int) -> NDArray[np.float64]:
        """Return float64 [depth]: the probability that a draft is accepted up to each depth."""
        return np.power(self.acceptance_rate, np.arange(1, depth + 1, dtype=np.float64))

    def _position(self, tokens: NDArray[np.int32], length: int) -> int | None:
        if length < MATCH_TOKENS:
            return None
        first, second, third = tokens[length - MATCH_TOKENS : length].tolist()
        return self._positions.get((first << 2 * _WIDTH) | (second << _WIDTH) | third)

    def _compare(self, tokens: NDArray[np.int32], length: int) -> None:
        expected = self.propose(tokens, self._end, length - self._end)
        if expected is None:
            return
        emitted = tokens[self._end : length]
        for token, actual in zip(expected.tolist(), emitted.tolist(), strict=True):
            self.acceptance_rate += ACCEPTANCE_EMA_WEIGHT * (
                (token == actual) - self.acceptance_rate
            )
            if token != actual:
                # The tokens behind the first difference continue another text.
                break


class NgramFallbackState:
    """A session's n-gram index, and whether its drafts are better than those of the drafter."""

    __slots__ = ("drafter_tokens_per_round", "lookup", "lookup_is_better")

    def __init__(self) -> None:
        self.lookup = NgramIndex()
        self.drafter_tokens_per_round: float | None = None
        """Mean number of tokens that a round with a draft of the drafter emits; None: there was no
        such round."""
        self.lookup_is_better = False
        """Whether a round with an n-gram draft is expected to emit more tokens."""
