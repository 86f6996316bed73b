"""Readers of tool calls in the text behind a marker that begins them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from outrider.text.output_parsers.events import ArgumentsDelta, OutputEvent, ToolCallStart
from outrider.text.output_parsers.json_call import MAX_NAME_CHARS, JsonCallReader
from outrider.text.output_parsers.json_value import JsonValueScanner, MalformedCallError
from outrider.text.output_parsers.markers import MarkedText


class CallReader(Protocol):
    """Reads the calls behind one marker."""

    @property
    def num_calls(self) -> int:
        """Number of calls whose names are known."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the calls are complete."""
        ...

    def read(self, text: str, events: list[OutputEvent]) -> str:
        """Read text, append the events that it completes to `events`, and return the text behind
        the calls. Raises MalformedCallError."""
        ...


_SPACE: Final = re.compile(r"\s")

MakeReader = Callable[[int], CallReader]
"""Function that makes the reader of calls whose first one has this index."""


class JsonCallsReader:
    """Reads one call as a JSON object (see `JsonCallReader`), or an array of them."""

    def __init__(self, index: int, *, first_keys: Collection[str] | None = None) -> None:
        """Create a reader; `first_keys` is as for `JsonCallReader`."""
        self._first_index, self._first_keys = index, first_keys
        self._is_array: bool | None = None
        """Whether the calls are in an array; None until the first character is known."""
        self._call: JsonCallReader | None = None
        """The call that is being read; None between the calls of an array."""
        self._num_complete = 0
        self.is_done = False

    @property
    def num_calls(self) -> int:
        """See `CallReader`."""
        return self._num_complete + bool(self._call is not None and self._call.name)

    def read(self, text: str, events: list[OutputEvent]) -> str:
        """See `CallReader`."""
        whole = text
        while text and not self.is_done:
            if self._call is not None:
                try:
                    text = self._call.read(text, events)
                except MalformedCallError as error:
                    raise MalformedCallError(
                        str(error), len(whole) - len(text) + error.position
                    ) from None
                if self._call.is_done:
                    self._call, self._num_complete = None, self._num_complete + 1
                    self.is_done = not self._is_array
            elif text[0].isspace():
                text = text.lstrip()
            elif self._is_array is None and text[0] == "[":
                self._is_array, text = True, text[1:]
            elif self._is_array and text[0] in ",]":
                self.is_done, text = text[0] == "]", text[1:]
            else:
                self._is_array = bool(self._is_array)
                self._call = JsonCallReader(
                    self._first_index + self._num_complete, first_keys=self._first_keys
                )
        return text


class NamedCallReader:
    """Reads a tool's name, a separator and the arguments as a JSON value."""

    def __init__(
        self, index: int, *, separators: Sequence[str], fences: Sequence[str] = ()
    ) -> None:
        """Create a reader of the call with this index.

        `separators`: texts that end the name. The separator "{" also begins the arguments.
        `fences`: texts before the arguments that are left out.
        """
        self._index = index
        self._separators, self._fences = separators, fences
        self._text = MarkedText()
        self._name = ""
        self._scanner: JsonValueScanner | None = None
        """Scanner of the arguments; None before the end of the name."""
        self._has_begun = False
        """Whether the arguments have begun."""
        self.is_done = False

    @property
    def num_calls(self) -> int:
        """See `CallReader`."""
        return int(self._scanner is not None)

    def read(self, text: str, events: list[OutputEvent]) -> str:
        """See `CallReader`."""
        if self._scanner is None:
            known = len(self._name) + len(self._text)
            self._text.push_text(text)
            part, separator = self._text.take_until(*self._separators)
            self._name += part
            self._check_name(known)
            if not separator:
                return ""
            name = self._name.strip()
            if not name:
                raise MalformedCallError("a call has no name", len(text) - len(self._text))
            events.append(ToolCallStart(self._index, name))
            self._scanner = JsonValueScanner()
            self._text.push_back("{" * (separator == "{"))
            received, text = len(text), self._text.take_all()
        else:
            received = len(text)
        return self._read_arguments(text, received, events)

    def _check_name(self, known: int) -> None:
        """Check the part of the name that was read. `known`: number of its characters before the
        text that is being read."""
        begin = len(self._name) - len(self._name.lstrip())
        space = _SPACE.search(self._name, begin)
        end = begin + MAX_NAME_CHARS if space is None else space.start()
        if end < len(self._name):
            raise MalformedCallError("a name has white space or is too long", max(0, end - known))

    def _read_arguments(self, text: str, received: int, events: list[OutputEvent]) -> str:
        """Read arguments, at the end of a text of `received` characters."""
        assert self._scanner is not None, "the name is known"
        if not self._has_begun:
            self._text.push_text(text)
            self._text.take_space()
            if self._text.take_prefix(*self._fences) is None:
                return ""
            self._text.take_space()
            text = self._text.take_all()
            if not text:
                return ""
            self._has_begun = True
        try:
            end = self._scanner.scan(text)
        except MalformedCallError as error:
            events.append(ArgumentsDelta(self._index, text[: error.position]))
            position = max(0, received - len(text) + error.position)
            raise MalformedCallError(str(error), position) from None
        events.append(ArgumentsDelta(self._index, text[:end]))
        self.is_done = self._scanner.is_done
        return text[end:]


class MistralCallsReader:
    """Reads what follows Mistral's `[TOOL_CALLS]`: an array of JSON objects, or (since tokenizer
    version 11) a name, `[ARGS]` or nothing, and the arguments."""

    def __init__(self, index: int) -> None:
        """Create a reader of the calls from this index on."""
        self._index = index
        self._reader: JsonCallsReader | NamedCallReader | None = None
        """Reader of the form in use; None until its first character is known."""

    @property
    def num_calls(self) -> int:
        """See `CallReader`."""
        return 0 if self._reader is None else self._reader.num_calls

    @property
    def is_done(self) -> bool:
        """See `CallReader`."""
        return self._reader is not None and self._reader.is_done

    def read(self, text: str, events: list[OutputEvent]) -> str:
        """See `CallReader`."""
        if self._reader is None:
            begin = text.lstrip()[:1]
            if not begin:
                return ""
            if begin in "[{":
                self._reader = JsonCallsReader(self._index)
            else:
                self._reader = NamedCallReader(self._index, separators=("[ARGS]", "{"))
        return self._reader.read(text, events)
