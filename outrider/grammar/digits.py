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
        begins = np.zeros(32 * words, dtype=np.bool_)
        for token in range(tokenizer.vocab_size):
            begins[token] = tokenizer.decode_bytes([token])[:1].isdigit()
        bits = np.packbits(begins, bitorder="little").view("<u4").astype(np.uint32)
        self._others = ~bits
        """The mask of ids whose text does not begin with a digit."""

    def advance(self, position: JsonPosition, token: int) -> JsonPosition:
        """The position behind a further token."""
        return position.advance(self._text_of(token))

    def restrict(self, mask: NDArray[np.uint32], position: JsonPosition) -> None:
        """Take further digits out of a mask [W], in place, where there are enough of them, unless
        nothing else is allowed."""
        if position.digits >= MAX_NUMBER_DIGITS:
            others = mask & self._others
            if others.any():
                mask[:] = others
