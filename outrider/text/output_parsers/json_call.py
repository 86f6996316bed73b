"""Reads one tool call that is written as a JSON object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from outrider.text.output_parsers.events import ArgumentsDelta, OutputEvent, ToolCallStart
from outrider.text.output_parsers.json_value import (
    JsonValueScanner,
    MalformedCallError,
    join_surrogates,
)

MAX_NAME_CHARS: Final = 256
"""Maximum length of a tool's name as JSON. A longer one counts as malformed."""
ARGUMENT_KEYS: Final = ("arguments", "parameters")
"""Names that the member with the arguments may have."""


class _CallState(Enum):
    BEFORE_OBJECT = auto()
    BEFORE_FIRST_KEY = auto()
    BEFORE_KEY = auto()
    KEY = auto()
    BEFORE_COLON = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    DONE = auto()


class JsonCallReader:
    """Reads `{"name": NAME, "arguments": ARGUMENTS}`; other members are ignored.

    The arguments are passed on as they are written. A string is decoded first, because some models
    write the arguments' JSON as a string.
    """

    def __init__(self, index: int, *, first_keys: Collection[str] | None = None) -> None:
        """Create a reader of the call with this index. `first_keys`: names that the first member
        may have, by which a call is distinguished from other JSON; None for any."""
        self._index = index
        self._first_keys = first_keys
        self._state = _CallState.BEFORE_OBJECT
        self._scanner: JsonValueScanner | None = None
        """Scanner of the key or value that is being read; None between them."""
        self._key = ""
        self._value: list[str] = []
        """Pieces of the key or value that is being read, unless it is passed on or ignored."""
        self._is_kept = self._is_streamed = False
        """Whether the value that is being read is kept in `_value`, or passed on immediately."""
        self._arguments: str | None = None
        """Arguments that were read before the name; None if there are none."""
        self._has_arguments = False
        self.name = ""
        """Name of the tool; "" until it is known."""

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._state is _CallState.DONE

    def read(self, text: str, events: list[OutputEvent]) -> str:
        """Read text, append the events that it completes to `events`, and return the text behind
        the object.

        Raises MalformedCallError if the text is no such object.
        """
        position = 0
        while position < len(text) and not self.is_done:
            if self._scanner is not None:
                try:
                    end = self._scanner.scan(text, position)
                except MalformedCallError as error:
                    self._take_part(text, position, error.position, events)
                    raise
                self._take_part(text, position, end, events)
                position = end
                if self._scanner.is_done:
                    self._end_value(position, events)
            elif text[position].isspace():
                position += 1
            else:
                position += self._read_mark(text[position], position, events)
        return text[position:]

    def _read_mark(self, char: str, position: int, events: list[OutputEvent]) -> int:
        """Read a character outside of keys and values. Return 1, or 0 if it begins a key or
        value."""
        match self._state, char:
            case _CallState.BEFORE_OBJECT, "{":
                self._state = _CallState.BEFORE_FIRST_KEY
            case ((_CallState.BEFORE_FIRST_KEY | _CallState.AFTER_VALUE), "}"):
                self._end_object(position, events)
            case ((_CallState.BEFORE_FIRST_KEY | _CallState.BEFORE_KEY), '"'):
                self._begin_value(_CallState.KEY, is_kept=True)
                return 0
            case _CallState.BEFORE_COLON, ":":
                self._state = _CallState.BEFORE_VALUE
            case _CallState.BEFORE_VALUE, _:
                is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
                self._is_streamed = is_arguments and bool(self.name) and char != '"'
                self._begin_value(
                    _CallState.VALUE,
                    is_kept=self._key == "name" or (is_arguments and not self._is_streamed),
                )
                return 0
            case _CallState.AFTER_VALUE, ",":
                self._state = _CallState.BEFORE_KEY
            case _:
                raise MalformedCallError(f"a call cannot have {char!r} here", position)
        return 1

    def _begin_value(self, state: _CallState, *, is_kept: bool) -> None:
        self._state, self._is_kept = state, is_kept
        self._scanner, self._value = JsonValueScanner(), []

    def _take_part(self, text: str, start: int, end: int, events: list[OutputEvent]) -> None:
        piece = text[start:end]
        if self._is_streamed and self._state is _CallState.VALUE:
            events.append(ArgumentsDelta(self._index, piece))
        elif self._is_kept:
            is_name = self._key == "name" or self._state is _CallState.KEY
            free = MAX_NAME_CHARS - sum(map(len, self._value)) if is_name else len(piece)
            if len(piece) > free:
                raise MalformedCallError(
                    f"a name is longer than {MAX_NAME_CHARS} characters", start + free
                )
            self._value.append(piece)

    def _end_value(self, position: int, events: list[OutputEvent]) -> None:
        self._scanner = None
        text = "".join(self._value)
        if self._state is _CallState.KEY:
            is_first, self._key = not self._key, _decode_string(text, position)
            if is_first and self._first_keys is not None and self._key not in self._first_keys:
                raise MalformedCallError(
                    f"a call does not begin with the member {self._key!r}", position
                )
            self._state = _CallState.BEFORE_COLON
            return
        self._state = _CallState.AFTER_VALUE
        if self._key == "name" and not self.name:
            self.name = _decode_string(text, position)
            if not self.name:
                raise MalformedCallError("a call has an empty name", position)
            events.append(ToolCallStart(self._index, self.name))
            if self._arguments is not None:
                events.append(ArgumentsDelta(self._index, self._arguments))
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if not self._is_streamed:
                arguments = _decode_string(text, position) if text.startswith('"') else text
                if self.name:
                    events.append(ArgumentsDelta(self._index, arguments))
                else:
                    self._arguments = arguments
        self._is_streamed = False

    def _end_object(self, position: int, events: list[OutputEvent]) -> None:
        if not self.name:
            raise MalformedCallError("a call has no name", position)
        if not self._has_arguments:
            events.append(ArgumentsDelta(self._index, "{}"))
        self._state = _CallState.DONE


def _decode_string(text: str, position: int) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        raise MalformedCallError(str(error), position) from None
    if not isinstance(value, str):
        raise MalformedCallError("a name is no string", position)
    return join_surrogates(value)
