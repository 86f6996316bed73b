"""Bounds the digits of numbers in JSON answers, as their white space is bounded.

JSON allows any number of digits, and a model that likes digits then never comes to an end. The
bound is kept wherever the grammar allows anything else than a further digit.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_NUMBER_DIGITS: Final = 32
"""Digits in a row in a JSON number: before the decimal point, behind it, and in the exponent."""
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_DIGITS: Final = frozenset(b"0123456789")


class JsonPosition(NamedTuple):
    """Where a JSON text ends, as far as digits are concerned."""

    in_string: bool = False
    escaped: bool = False
    """Whether a backslash comes last in a string."""
    digits: int = 0
    """Digits in a row at the end, outside of strings."""

    def advance(self, text: bytes) -> JsonPosition:
        """The position behind a further piece of text."""
        in_string, escaped, digits = self
        for byte in text:
            if in_string:
                in_string = escaped or byte != _QUOTE
                escaped = not escaped and byte == _BACKSLASH
            else:
                in_string = byte == _QUOTE
                digits = digits + 1 if byte in _DIGITS else 0
        return JsonPosition(in_string, escaped, digits)


class DigitBound:
    """The bound for one tokenizer; W words of a mask. Thread-safe."""

    def __init__(self, tokenizer: LLTokenizer, words: int) -> None:
        self._text_of = functools.lru_cache(maxsize=1 << 16)(
            lambda token: tokenizer.decode_bytes([token])
        )
        starts_with_digit = np.zeros(32 * words, dtype=np.bool_)
        starts_with_zeros = np.zeros(32 * words, dtype=np.bool_)
        for token in range(tokenizer.vocab_size):
            text = tokenizer.decode_bytes([token])
            starts_with_digit[token] = text[:1].isdigit()
            starts_with_zeros[token] = text[:1] == b"0" and not text.lstrip(b"0")[:1].isdigit()
        self._others = ~_pack_bits(starts_with_digit)
        """The mask of ids whose text does not begin with a digit."""
        self._not_zeros = ~_pack_bits(starts_with_zeros)
        """The mask of ids whose text does not begin with digits that are all zeros."""

    def advance(self, position: JsonPosition, token: int) -> JsonPosition:
        """The position behind a further token."""
        return position.advance(self._text_of(token))

    def restrict(self, mask: NDArray[np.uint32], position: JsonPosition) -> None:
        """Take further digits out of a mask [W], in place, where there are enough of them, unless
        nothing else is allowed. Then zeros are taken out, unless nothing else is allowed: behind
        them a number above an exclusive bound could never end."""
        if position.digits < MAX_NUMBER_DIGITS:
            return
        for kept in (self._others, self._not_zeros):
            allowed = mask & kept
            if allowed.any():
                mask[:] = allowed
                return


def _pack_bits(flags: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """The mask [W] of flags [32 W]."""
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
