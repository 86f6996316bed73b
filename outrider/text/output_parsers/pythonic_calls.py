"""Reads tool calls that are written as a list of Python calls, as Llama models may write them.

[get_weather(city="Paris", days=2), get_time()]
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Any, Final

from outrider.text.output_parsers.events import ArgumentsDelta, OutputEvent, ToolCallStart
from outrider.text.output_parsers.json_call import MAX_NAME_CHARS
from outrider.text.output_parsers.json_value import (
    MAX_DEPTH,
    MalformedCallError,
    join_surrogates,
)
from outrider.text.output_parsers.markers import MAX_HELD_CHARS, HeldText, skip_space

_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")
_MARKS: Final = re.compile(r"[\"'()\[\]{}]")
_STRING_MARKS: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
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
    when it is complete, with its arguments as JSON. Arguments of more than `MAX_HELD_CHARS`
    characters count as malformed."""

    def __init__(self, index: int, *, names: Collection[str] | None = None) -> None:
        """Create a reader of the calls from this index on. `names`: names that the tools may have;
        None for any."""
        self._first_index, self._names = index, names
        self.num_calls = 0
        """Number of complete calls."""
        self.is_in_call = False
        """Whether a call was completed by the last text. Before its end, it may be no call."""
        self._state = _PythonicState.BEFORE_LIST
        self._name = ""
        self._arguments = HeldText()
        """Text of the arguments so far, without the opening bracket."""
        self._closing: list[str] = []
        """Closing brackets of those that are open in the arguments, the innermost last."""
        self._quote = ""
        """Quote that ends the string that is being read; "" outside of strings."""
        self._escaped = False

    @property
    def is_done(self) -> bool:
        """See `CallReader`."""
        return self._state is _PythonicState.DONE

    def read(self, text: str, start: int, events: list[OutputEvent]) -> int:
        """See `CallReader`."""
        position, self.is_in_call = start, False
        while position < len(text) and not (self.is_done or self.is_in_call):
            if self._state is _PythonicState.ARGUMENTS:
                position = self._read_arguments(text, position, events)
            elif self._state is _PythonicState.NAME:
                position = self._read_name(text, position)
            elif text[position].isspace():
                position = skip_space(text, position)
            else:
                position = self._read_mark(text, position)
        return position

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
            if self._names is not None and self._name not in self._names:
                raise MalformedCallError(f"there is no tool {self._name!r}", position)
            self._state, self._closing = _PythonicState.ARGUMENTS, [")"]
        elif len(self._name) < MAX_NAME_CHARS and _NAME.fullmatch(self._name + char):
            self._name += char
        else:
            raise MalformedCallError(f"a tool's name cannot have {char!r} here", position)
        return position + 1

    def _read_arguments(self, text: str, start: int, events: list[OutputEvent]) -> int:
        end = min(len(text), start + MAX_HELD_CHARS - len(self._arguments))
        if start >= end:
            raise MalformedCallError("the arguments of a call are too long", start)
        position = start
        while position < end and self._closing:
            if self._escaped:
                self._escaped, position = False, position + 1
                continue
            marks = _STRING_MARKS[self._quote] if self._quote else _MARKS
            found = marks.search(text, position, end)
            if found is None:
                position = end
                break
            position = found.end()
            if not self._quote:
                self._read_bracket(found[0], found.start())
            elif found[0] == self._quote:
                self._quote = ""
            else:
                self._escaped = True
        self._arguments.push_text(text[start:position])
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
            found = _keyword_arguments(self._arguments.take_all()[:-1])
            arguments = join_surrogates(json.dumps(found, ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise MalformedCallError(f"no keyword arguments: {error}", position) from None
        index = self._first_index + self.num_calls
        events += (ToolCallStart(index, self._name), ArgumentsDelta(index, arguments))
        self.num_calls, self.is_in_call = self.num_calls + 1, True
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
