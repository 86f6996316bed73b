"""Reads tool calls that are written as a list of Python calls, as Llama models may write them.

[get_weather(city="Paris", days=2), get_time()]
"""

from __future__ import annotations

import ast
import json
import re
from enum import Enum, auto
from typing import Any, Final

from outrider.text.output_parsers.events import ArgumentsDelta, OutputEvent, ToolCallStart
from outrider.text.output_parsers.json_call import MAX_NAME_CHARS
from outrider.text.output_parsers.json_value import (
    MAX_DEPTH,
    MalformedCallError,
    join_surrogates,
)

_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")
_MARKS: Final = re.compile(r"[\"'()\[\]{}]")
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}


class _PythonicState(Enum):
    BEFORE_LIST = auto()
    BEFORE_CALL = auto()
    NAME = auto()
    ARGUMENTS = auto()
    AFTER_CALL = auto()
    DONE = auto()


class PythonicCallsReader:
    """Reads a list of calls with keyword arguments, whose values are literals. A call is passed on
    when it is complete, with its arguments as JSON."""

    def __init__(self, index: int) -> None:
        """Create a reader of the calls from this index on."""
        self._first_index = index
        self.num_calls = 0
        """Number of complete calls."""
        self._state = _PythonicState.BEFORE_LIST
        self._name = self._arguments = ""
        self._closing: list[str] = []
        """Closing brackets of those that are open in the arguments, the innermost last."""
        self._quote = ""
        """Quote that ends the string that is being read; "" outside of strings."""
        self._escaped = False

    @property
    def is_done(self) -> bool:
        """See `CallReader`."""
        return self._state is _PythonicState.DONE

    def read(self, text: str, events: list[OutputEvent]) -> str:
        """See `CallReader`."""
        position = 0
        while position < len(text) and not self.is_done:
            if self._state is _PythonicState.ARGUMENTS:
                position = self._read_arguments(text, position, events)
            elif self._state is _PythonicState.NAME:
                position = self._read_name(text, position)
            elif text[position].isspace():
                position += 1
            else:
                position = self._read_mark(text, position)
        return text[position:]

    def _read_mark(self, text: str, position: int) -> int:
        match self._state, text[position]:
            case _PythonicState.BEFORE_LIST, "[":
                self._state = _PythonicState.BEFORE_CALL
            case _PythonicState.AFTER_CALL, ",":
                self._state = _PythonicState.BEFORE_CALL
            case _PythonicState.AFTER_CALL, "]":
                self._state = _PythonicState.DONE
            case _PythonicState.BEFORE_CALL, _:
                self._state, self._name = _PythonicState.NAME, ""
                return position
            case _, char:
                raise MalformedCallError(f"a list of calls cannot have {char!r} here", position)
        return position + 1

    def _read_name(self, text: str, position: int) -> int:
        char = text[position]
        if char == "(" and self._name:
            self._state, self._arguments, self._closing = _PythonicState.ARGUMENTS, "", [")"]
        elif len(self._name) < MAX_NAME_CHARS and _NAME.fullmatch(self._name + char):
            self._name += char
        else:
            raise MalformedCallError(f"a tool's name cannot have {char!r} here", position)
        return position + 1

    def _read_arguments(self, text: str, position: int, events: list[OutputEvent]) -> int:
        start = position
        while position < len(text) and self._closing:
            char = text[position]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                if char == self._quote:
                    self._quote = ""
            elif _MARKS.match(char):
                self._read_bracket(char, position)
            position += 1
        self._arguments += text[start:position]
        if not self._closing:
            self._end_call(position, events)
        return position

    def _read_bracket(self, char: str, position: int) -> None:
        if char in "\"'":
            self._quote = char
        elif char not in _CLOSING:
            if self._closing.pop() != char:
                raise MalformedCallError(f"a bracket {char!r} closes nothing", position)
        elif len(self._closing) == MAX_DEPTH:
            raise MalformedCallError(f"arguments are nested deeper than {MAX_DEPTH}", position)
        else:
            self._closing.append(_CLOSING[char])

    def _end_call(self, position: int, events: list[OutputEvent]) -> None:
        try:
            found = _keyword_arguments(self._arguments[:-1])
            arguments = join_surrogates(json.dumps(found, ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise MalformedCallError(f"no keyword arguments: {error}", position) from None
        index = self._first_index + self.num_calls
        events += (ToolCallStart(index, self._name), ArgumentsDelta(index, arguments))
        self.num_calls += 1
        self._state = _PythonicState.AFTER_CALL


def _keyword_arguments(text: str) -> dict[str, Any]:
    """Return the keyword arguments of a call by name. Raises ValueError or SyntaxError if there are
    others, or if a value is no literal that JSON has."""
    call = ast.parse(f"f({text}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError("a positional argument")
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise ValueError("an argument without a name, or twice")
        found[keyword.arg] = ast.literal_eval(keyword.value)
    return found
