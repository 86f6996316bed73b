"""Limit on the number of digits of numbers in JSON answers.

JSON allows any number of digits, so a model that prefers digits might never end a number. The limit
applies only where the grammar allows something other than a digit, too.

A grammar in Lark's syntax gets the limit if its first line says so (see `json_numbers_line`). The
server writes this line into the grammars that it makes of JSON schemas.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.structured_output import StructuredKind, StructuredOutput

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
_LINE_BEGIN: Final = "// json_numbers "
_MAX_TAG_PARTS: Final = 64
"""Maximum number of texts and ids in a tag of a grammar's first line."""
_MAX_TAG_CHARS: Final = 256
"""Maximum length of a text in such a tag."""


class ReasoningTags(NamedTuple):
    """Texts around the reasoning that may precede the JSON text of an answer."""

    open_tag: bytes
    close_tag: bytes
    is_open: bool
    """Whether the text begins inside the reasoning."""


class JsonPosition(NamedTuple):
    """State at the end of an incomplete text, from which follows how many digits may be added. The
    text is JSON, or has strings in double quotes as JSON has, perhaps behind reasoning."""

    in_string: bool = False
    escaped: bool = False
    """Whether the text ends with a backslash inside a string."""
    digits: int = 0
    """Number of consecutive digits at the end of the text, outside of strings."""
    in_exponent: bool = False
    """Whether the text ends in the exponent of a number, before or after the sign."""
    reasoning: ReasoningTags | None = None
    """Tags of the reasoning, which may begin or has not ended; None outside of reasoning."""
    tail: bytes = b""
    """End of the text that may be the beginning of a tag of the reasoning."""

    @property
    def digits_left(self) -> int:
        """Number of digits that may be added. In reasoning it does not decrease."""
        limit = MAX_EXPONENT_DIGITS if self.in_exponent else MAX_NUMBER_DIGITS
        return max(0, limit - self.digits)

    def advance(self, text: bytes) -> JsonPosition:
        """Return the position after `text` is added to the JSON text."""
        if self.reasoning is not None:
            return _advance_reasoning(self.reasoning, self.tail + text)
        in_string, escaped, digits, in_exponent, *_ = self
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


def _advance_reasoning(tags: ReasoningTags, text: bytes) -> JsonPosition:
    """Return the position behind a text that begins with reasoning, or before it."""
    if not tags.is_open:
        if text.startswith(tags.open_tag):
            return _advance_reasoning(tags._replace(is_open=True), text[len(tags.open_tag) :])
        if tags.open_tag.startswith(text):
            return JsonPosition(reasoning=tags, tail=text)
        return JsonPosition().advance(text)
    end = text.find(tags.close_tag)
    if end >= 0:
        return JsonPosition().advance(text[end + len(tags.close_tag) :])
    return JsonPosition(reasoning=tags, tail=text[max(0, len(text) - len(tags.close_tag) + 1) :])


TagParts = Sequence[str | int]
"""Texts, and ids of special tokens, which together are a tag."""


def json_numbers_line(
    reasoning: tuple[TagParts, TagParts, bool] | None = None,
) -> str:
    """Return the first line of a grammar in Lark's syntax whose numbers are those of JSON, so that
    `DigitBound` applies to them. `reasoning`: the open tag and the close tag of the reasoning that
    may precede them, and whether the prompt has ended with the open tag; None without reasoning.
    """
    return _LINE_BEGIN + json.dumps(reasoning)


def has_json_numbers(structured: StructuredOutput) -> bool:
    """Return whether `DigitBound` applies to an answer: it is JSON, or its grammar says so."""
    if structured.kind is StructuredKind.GRAMMAR:
        return structured.text.startswith(_LINE_BEGIN)
    return structured.kind is not StructuredKind.REGEX


class DigitBound:
    """Removes ids with too many digits from the allowed-token masks of one tokenizer. Thread-safe.

    In shapes, W is the number of words of a mask.
    """

    def __init__(self, tokenizer: LLTokenizer, words: int) -> None:
        self._text_of = functools.lru_cache(maxsize=1 << 16)(
            lambda token: tokenizer.decode_bytes([token])
        )
        self._vocab_size = tokenizer.vocab_size
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

    def start_position(self, structured: StructuredOutput) -> JsonPosition:
        """Return the position at the beginning of an answer to which the bound applies. A client's
        own grammar may have a first line that is no valid one; it counts as one without
        reasoning."""
        if structured.kind is not StructuredKind.GRAMMAR:
            return JsonPosition()
        line = structured.text.partition("\n")[0].removeprefix(_LINE_BEGIN)
        try:
            open_tag, close_tag, is_open = json.loads(line)
            tags = ReasoningTags(self._tag(open_tag), self._tag(close_tag), bool(is_open))
        except (ValueError, TypeError, RecursionError):
            return JsonPosition()
        return JsonPosition(reasoning=tags)

    def _tag(self, parts: object) -> bytes:
        """Return the text of a tag. Raises ValueError or TypeError."""
        if not isinstance(parts, list) or not 0 < len(parts) <= _MAX_TAG_PARTS:
            raise ValueError("a tag is a list of texts and ids")
        text = b""
        for part in parts:
            if isinstance(part, str) and len(part) <= _MAX_TAG_CHARS:
                text += part.encode()
            elif isinstance(part, int) and 0 <= part < self._vocab_size:
                text += self._text_of(part)
            else:
                raise ValueError("a part of a tag is a text or an id")
        if not text:
            raise ValueError("a tag is not empty")
        return text

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
