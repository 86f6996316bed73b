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
from outrider.text.output_parsers.markers import MAX_HELD_CHARS

MAX_NAME_CHARS: Final = 64
"""Maximum length of a tool's name, which is that of a request's tools. A longer one counts as
malformed."""
_MAX_NAME_JSON_CHARS: Final = 6 * MAX_NAME_CHARS + 2
"""Maximum length of a tool's name as JSON, in which each character may be an escape."""
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
    write the arguments' JSON as a string. An object that is longer than `MAX_HELD_CHARS` before the
    call begins counts as malformed.
    """

    def __init__(
        self,
        index: int,
        *,
        first_keys: Collection[str] | None = None,
        names: Collection[str] | None = None,
        needs_arguments: bool = False,
    ) -> None:
        """Create a reader of the call with this index.

        The other parameters distinguish a call from other JSON. `first_keys`: names that the first
        member may have; None for any. `names`: names that the tool may have; None for any.
        `needs_arguments`: whether an object without arguments is no call.
        """
        self._index = index
        self._first_keys, self._names = first_keys, names
        self._needs_arguments = needs_arguments
        self._state = _CallState.BEFORE_OBJECT
        self._scanner: JsonValueScanner | None = None
        """Scanner of the key or value that is being read; None between them."""
        self._key = ""
        self._value: list[str] = []
        """Pieces of the key or value that is being read, unless it is passed on or ignored."""
        self._is_kept = self._is_streamed = False
        """Whether the value that is being read is kept in `_value`, or passed on immediately."""
        self._name = ""
        """Name of the tool; "" until it is known."""
        self._arguments: str | None = None
        """Arguments that were read before the name; None if there are none."""
        self._has_arguments = False
        self._num_held = 0
        """Number of characters that were read before the call began."""
        self.has_begun = False
        """Whether the text is known to be a call, so that its beginning was passed on."""

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._state is _CallState.DONE

    def read(self, text: str, start: int, events: list[OutputEvent]) -> int:
        """Read text from the index `start` on, append the events that it completes to `events`, and
        return the index behind the part that belongs to the object.

        Raises MalformedCallError if the text is no such object.
        """
        position = start
        while position < len(text) and not self.is_done:
            end = len(text)
            if not self.has_begun:
                end = min(end, start + MAX_HELD_CHARS - self._num_held)
                if position >= end:
                    raise MalformedCallError("a call has too much text before its name", position)
            if self._scanner is not None:
                try:
                    stop = self._scanner.scan(text, position, end)
                except MalformedCallError as error:
                    self._take_part(text, position, error.position, events)
                    raise
                self._take_part(text, position, stop, events)
                position = stop
                if self._scanner.is_done:
                    self._end_value(position, events)
            elif text[position].isspace():
                position += 1
            else:
                position += self._read_mark(text[position], position, events)
        self._num_held += position - start
        return position

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
                if is_arguments and self._name:
                    self._begin_call(events)
                self._is_streamed = is_arguments and self.has_begun and char != '"'
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
        if self._is_streamed and self._state is _CallState.VALUE:
            events.append(ArgumentsDelta(self._index, text[start:end]))
        elif self._is_kept:
            is_name = self._key == "name" or self._state is _CallState.KEY
            if is_name:
                free = _MAX_NAME_JSON_CHARS - sum(map(len, self._value))
                if end - start > free:
                    raise MalformedCallError(
                        f"a name is longer than {MAX_NAME_CHARS} characters", start + free
                    )
            self._value.append(text[start:end])

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
        if self._key == "name" and not self._name:
            self._name = self._checked_name(_decode_string(text, position), position)
            if self._has_arguments or not self._needs_arguments:
                self._begin_call(events)
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if not self._is_streamed:
                arguments = _decode_string(text, position) if text.startswith('"') else text
                if self.has_begun:
                    events.append(ArgumentsDelta(self._index, arguments))
                else:
                    self._arguments = arguments
        self._is_streamed = False

    def _checked_name(self, name: str, position: int) -> str:
        if not name or len(name) > MAX_NAME_CHARS:
            raise MalformedCallError("a call has an empty or long name", position)
        if self._names is not None and name not in self._names:
            raise MalformedCallError(f"there is no tool {name!r}", position)
        return name

    def _begin_call(self, events: list[OutputEvent]) -> None:
        if not self.has_begun:
            self.has_begun = True
            events.append(ToolCallStart(self._index, self._name))
            if self._arguments is not None:
                events.append(ArgumentsDelta(self._index, self._arguments))

    def _end_object(self, position: int, events: list[OutputEvent]) -> None:
        if not self.has_begun:
            raise MalformedCallError("a call has no name or no arguments", position)
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
