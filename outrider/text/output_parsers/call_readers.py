"""Readers of tool calls in the text behind a marker that begins them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from outrider.text.output_parsers.events import ArgumentsDelta, OutputEvent, ToolCallStart
from outrider.text.output_parsers.json_call import MAX_NAME_CHARS, JsonCallReader
from outrider.text.output_parsers.json_value import JsonValueScanner, MalformedCallError
from outrider.text.output_parsers.markers import find_marker, skip_space
from outrider.text.stop_strings import partial_match_len


class CallReader(Protocol):
    """Reads the calls behind one marker."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        ...

    @property
    def is_in_call(self) -> bool:
        """Whether the part that was read last belongs to a call that has begun. Otherwise it may
        turn out to be no call."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the calls are complete."""
        ...

    def read(self, text: str, start: int, events: list[OutputEvent]) -> int:
        """Read text from the index `start` on, at most up to the end of a call. Append the events
        that it completes to `events`, and return the index behind the part that was read. If the
        calls are not complete, the rest of the text must be read again together with the text that
        follows it.

        Raises MalformedCallError.
        """
        ...


class MakeReader(Protocol):
    """Function that makes a reader of calls."""

    def __call__(self, index: int) -> CallReader:
        """Return the reader of calls whose first one has this index."""
        ...


_SPACE: Final = re.compile(r"\s")
_CALL_ID: Final = "[CALL_ID]"
_ARGS: Final = "[ARGS]"


class JsonCallsReader:
    """Reads one call as a JSON object (see `JsonCallReader`), or an array of them."""

    def __init__(
        self, index: int, *, make_reader: Callable[[int], JsonCallReader] = JsonCallReader
    ) -> None:
        """Create a reader of the calls from this index on. `make_reader`: makes the reader of the
        call with an index."""
        self._first_index, self._make_reader = index, make_reader
        self._is_array: bool | None = None
        """Whether the calls are in an array; None until the first character is known."""
        self._call: JsonCallReader | None = None
        """The call that is being read, or whose end was read last; None between the calls of an
        array."""
        self._num_complete = 0
        """Number of complete calls before the present one."""
        self.is_done = False

    @property
    def num_calls(self) -> int:
        """See `CallReader`."""
        return self._num_complete + self.is_in_call

    @property
    def is_in_call(self) -> bool:
        """See `CallReader`."""
        return self._call is not None and self._call.has_begun

    def read(self, text: str, start: int, events: list[OutputEvent]) -> int:
        """See `CallReader`."""
        position = start
        if self._call is not None and self._call.is_done:
            self._call, self._num_complete = None, self._num_complete + 1
        while position < len(text) and not self.is_done:
            if self._call is not None:
                position = self._call.read(text, position, events)
                if self._call.is_done:
                    self.is_done = not self._is_array
                    break
            elif text[position].isspace():
                position = skip_space(text, position)
            elif self._is_array is None and text[position] == "[":
                self._is_array, position = True, position + 1
            elif self._is_array and text[position] in ",]":
                self.is_done, position = text[position] == "]", position + 1
            else:
                self._is_array = bool(self._is_array)
                self._call = self._make_reader(self._first_index + self._num_complete)
        return position


class NamedCallReader:
    """Reads a tool's name, a separator and the arguments as a JSON value.

    The id of a call between `[CALL_ID]` and `[ARGS]`, as in Mistral's format, is left out.
    """

    def __init__(self, index: int, *, separators: Sequence[str], fence: str = "") -> None:
        """Create a reader of the call with this index.

        `separators`: texts that end the name. The separator "{" also begins the arguments.
        `fence`: text that may stand before the arguments, in which case three backticks may stand
        behind them; "" for none.
        """
        self._index = index
        self._separators, self._fence = tuple(separators), fence
        self._scanner: JsonValueScanner | None = None
        """Scanner of the arguments; None before the end of the name."""
        self._in_call_id = self._is_fenced = False
        """Whether an id is being read, and whether the arguments stand between fences."""
        self._has_begun = False
        """Whether the arguments have begun."""
        self.is_done = False

    @property
    def num_calls(self) -> int:
        """See `CallReader`."""
        return int(self.is_in_call)

    @property
    def is_in_call(self) -> bool:
        """See `CallReader`."""
        return self._scanner is not None

    def read(self, text: str, start: int, events: list[OutputEvent]) -> int:
        """See `CallReader`."""
        position = start
        if self._scanner is None:
            position = self._read_name(text, skip_space(text, position), events)
            if self._scanner is None:
                return position
        if self._in_call_id:
            position, separator = self._read_word(text, position, (_ARGS,))
            if not separator:
                return position
            self._in_call_id = False
        if not self._has_begun:
            position = self._begin_arguments(text, position)
        if self._has_begun:
            position = self._read_arguments(text, position, events)
        return position

    def _read_name(self, text: str, start: int, events: list[OutputEvent]) -> int:
        position, separator = self._read_word(text, start, self._separators)
        if separator:
            name = text[start : position - len(separator)]
            if not name:
                raise MalformedCallError("a call has no name", position)
            events.append(ToolCallStart(self._index, name))
            self._scanner, self._in_call_id = JsonValueScanner(), separator == _CALL_ID
            position -= separator == "{"
        return position

    def _read_word(self, text: str, start: int, separators: tuple[str, ...]) -> tuple[int, str]:
        """Find the separator behind a name or an id that begins at `start`. Return the index behind
        it and the separator; `start` and "" if more text is needed."""
        longest = max(map(len, separators))
        found = find_marker(text, start, start + MAX_NAME_CHARS + longest, separators)
        if found is not None:
            end = found.start()
        elif len(text) - start >= MAX_NAME_CHARS + longest:
            end = start + MAX_NAME_CHARS + 1
        else:
            end = len(text) - partial_match_len(text[start:], separators)
        space = _SPACE.search(text, start, end)
        limit = start + MAX_NAME_CHARS if space is None else space.start()
        if limit < end:
            raise MalformedCallError("a name has white space or is too long", limit)
        return (start, "") if found is None else (found.end(), found[0])

    def _begin_arguments(self, text: str, start: int) -> int:
        position = skip_space(text, start)
        if self._fence and not self._is_fenced:
            is_open, position = _skip_prefix(text, position, self._fence)
            if is_open is None:
                return position
            self._is_fenced, position = is_open, skip_space(text, position)
        self._has_begun = position < len(text)
        return position

    def _read_arguments(self, text: str, start: int, events: list[OutputEvent]) -> int:
        assert self._scanner is not None, "the name is known"
        try:
            position = self._scanner.scan(text, start, len(text))
        except MalformedCallError as error:
            events.append(ArgumentsDelta(self._index, text[start : error.position]))
            raise
        events.append(ArgumentsDelta(self._index, text[start:position]))
        self.is_done = self._scanner.is_done
        if self.is_done and self._is_fenced:
            is_closed, position = _skip_prefix(text, skip_space(text, position), "```")
            self.is_done = is_closed is not None
        return position


def _skip_prefix(text: str, position: int, prefix: str) -> tuple[bool | None, int]:
    """Return whether a text has a prefix at an index, None if more text is needed to decide, and
    the index behind it."""
    if text.startswith(prefix, position):
        return True, position + len(prefix)
    is_partial = len(text) - position < len(prefix) and prefix.startswith(text[position:])
    return (None if is_partial else False), position


class MistralCallsReader:
    """Reads what follows Mistral's `[TOOL_CALLS]`.

    It is an array of JSON objects, or a name and the arguments. Tokenizers of version 11 write
    `[CALL_ID]`, the id of the call and `[ARGS]` between them, later ones only `[ARGS]`. Source:
    Mistral's tokenizers (mistral-common, instruct tokenizers of the versions 11 and 13).
    """

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
    def is_in_call(self) -> bool:
        """See `CallReader`."""
        return self._reader is not None and self._reader.is_in_call

    @property
    def is_done(self) -> bool:
        """See `CallReader`."""
        return self._reader is not None and self._reader.is_done

    def read(self, text: str, start: int, events: list[OutputEvent]) -> int:
        """See `CallReader`."""
        position = start
        if self._reader is None:
            position = skip_space(text, position)
            if position == len(text):
                return position
            if text[position] in "[{":
                self._reader = JsonCallsReader(self._index)
            else:
                self._reader = NamedCallReader(self._index, separators=(_CALL_ID, _ARGS, "{"))
        return self._reader.read(text, position, events)
