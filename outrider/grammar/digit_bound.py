"""Limit on the number of digits of numbers in JSON answers.

JSON allows any number of digits, so a model that prefers digits might never end a number. The limit
applies only where the grammar allows something other than a digit, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_NUMBER_DIGITS: Final = 32
"""Maximum number of digits before the decimal point of a JSON number, and also after it."""
MAX_EXPONENT_DIGITS: Final = 3
"""Maximum number of digits in the exponent of a JSON number."""
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_DIGITS: Final = frozenset(b"0123456789")
_EXPONENT: Final = frozenset(b"eE")
_SIGNS: Final = frozenset(b"+-")


class JsonPosition(NamedTuple):
    """State at the end of an incomplete JSON text, from which follows how many digits may be
    added."""

    in_string: bool = False
    escaped: bool = False
    """Whether the text ends with a backslash inside a string."""
    digits: int = 0
    """Number of consecutive digits at the end of the text, outside of strings."""
    in_exponent: bool = False
    """Whether the text ends in the exponent of a number, before or after the sign."""

    @property
    def digits_left(self) -> int:
        """Number of digits that may be added."""
        limit = MAX_EXPONENT_DIGITS if self.in_exponent else MAX_NUMBER_DIGITS
        return max(0, limit - self.digits)

    def advance(self, text: bytes) -> JsonPosition:
        """Return the position after `text` is added to the JSON text."""
        in_string, escaped, digits, in_exponent = self
        for byte in text:
            if in_string:
                in_string = escaped or byte != _QUOTE
                escaped = not escaped and byte == _BACKSLASH
            elif byte in _DIGITS:
                digits += 1
            else:
                in_string = byte == _QUOTE
                # The letter e of a literal such as `true` follows no digit.
                begins = byte in _EXPONENT and digits > 0
                in_exponent = begins or (in_exponent and digits == 0 and byte in _SIGNS)
                digits = 0
        return JsonPosition(in_string, escaped, digits, in_exponent)


class DigitBound:
    """Removes ids with too many digits from the allowed-token masks of one tokenizer. Thread-safe.

    In shapes, W is the number of words of a mask.
    """

    def __init__(self, tokenizer: LLTokenizer, words: int) -> None:
        self._text_of = functools.lru_cache(maxsize=1 << 16)(
            lambda token: tokenizer.decode_bytes([token])
        )
        runs = np.zeros(32 * words, dtype=np.int64)
        """Number of digits with which the text of each token id begins."""
        starts_with_zeros = np.zeros(32 * words, dtype=np.bool_)
        for token in range(tokenizer.vocab_size):
            text = tokenizer.decode_bytes([token])
            runs[token] = len(text) - len(text.lstrip(b"0123456789"))
            starts_with_zeros[token] = text[:1] == b"0" and not text.lstrip(b"0")[:1].isdigit()
        self._up_to = [_pack_bits(runs <= count) for count in range(MAX_EXPONENT_DIGITS)]
        """Entry n is the mask of ids whose text begins with at most n digits."""
        self._not_zeros = ~_pack_bits(starts_with_zeros)
        """The mask of ids whose text does not begin with digits that are all zeros."""

    def advance(self, position: JsonPosition, token: int) -> JsonPosition:
        """Return the position after the text of a token id is added to the JSON text."""
        return position.advance(self._text_of(token))

    def restrict(self, mask: NDArray[np.uint32], position: JsonPosition) -> None:
        """Remove the ids whose text begins with more digits than may follow at `position` from a
        mask, uint32 [W], in place.

        If the mask allows no other ids, those that begin with zeros and no other digit are removed
        instead: a number that must exceed an exclusive bound could otherwise continue with zeros
        forever. If the mask allows only such ids, it is not changed.
        """
        left = position.digits_left
        if left >= len(self._up_to):
            return
        for kept in (self._up_to[left], self._not_zeros):
            allowed = mask & kept
            if allowed.any():
                mask[:] = allowed
                return


def _pack_bits(flags: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return the mask [W] of flags, bool [32 W]."""
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
