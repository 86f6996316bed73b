"""Finds the end of one JSON value in text that arrives in pieces."""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH: Final = 128
"""Maximum nesting depth of a value. A deeper one counts as malformed."""
_CLOSING: Final = {"{": "}", "[": "]"}
_MARKS: Final = re.compile(r'["{}\[\]]')
_STRING_MARKS: Final = re.compile(r'["\\]')
_SCALAR_END: Final = re.compile(r"[\s,}\]:]")
_SCALAR_START: Final = frozenset("-0123456789tfn")


class MalformedCallError(ValueError):
    """A text that is no tool call, or no JSON value."""

    def __init__(self, message: str, position: int) -> None:
        """Create an error. `position`: index, in the text that was being read, of the first
        character that does not fit."""
        super().__init__(message)
        self.position = position


class JsonValueScanner:
    """Finds the end of one value. It checks brackets and strings, not numbers and names."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        """Closing brackets of the objects and arrays that are open, the innermost last."""
        self._in_string = self._escaped = False
        self._in_scalar = False
        self.is_done = False
        """Whether the value is complete."""

    def scan(self, text: str, start: int, end: int) -> int:
        """Continue with the text between the indices `start` and `end`. Return the index after the
        part that belongs to the value. The first character of a value must not be white space.

        Raises MalformedCallError.
        """
        position = start
        while position < end and not self.is_done:
            if self._escaped:
                self._escaped = False
                position += 1
            elif self._in_string:
                position = self._scan_string(text, position, end)
            elif self._in_scalar:
                found = _SCALAR_END.search(text, position, end)
                if found is None:
                    return end
                self._in_scalar, self.is_done = False, True
                position = found.start()
            elif self._closing:
                position = self._scan_nested(text, position, end)
            else:
                position = self._begin(text, position)
        return position

    def _begin(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._closing.append(_CLOSING[char])
        elif char in _SCALAR_START:
            self._in_scalar = True
        else:
            raise MalformedCallError(f"a JSON value cannot begin with {char!r}", position)
        return position + 1

    def _scan_string(self, text: str, position: int, end: int) -> int:
        found = _STRING_MARKS.search(text, position, end)
        if found is None:
            return end
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.is_done = not self._closing
        return found.end()

    def _scan_nested(self, text: str, position: int, end: int) -> int:
        found = _MARKS.search(text, position, end)
        if found is None:
            return end
        char = found[0]
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            if len(self._closing) == MAX_DEPTH:
                raise MalformedCallError(
                    f"a JSON value is nested deeper than {MAX_DEPTH}", found.start()
                )
            self._closing.append(_CLOSING[char])
        elif self._closing.pop() != char:
            raise MalformedCallError(f"a bracket {char!r} closes nothing", found.start())
        else:
            self.is_done = not self._closing
        return found.end()


def join_surrogates(text: str) -> str:
    """Return a text in which escaped halves of surrogate pairs are joined, and halves without the
    other one replaced by U+FFFD, because they cannot be sent as UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
