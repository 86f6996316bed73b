"""Output parser of tool calls that begin with a marker."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from outrider.text.output_parsers.call_readers import CallReader, MakeReader
from outrider.text.output_parsers.content import ContentText
from outrider.text.output_parsers.events import OutputEvent
from outrider.text.output_parsers.json_value import MalformedCallError
from outrider.text.output_parsers.stepping import SteppingParser


class _MarkedCallState(Enum):
    CONTENT = auto()
    CALLS = auto()
    """Behind the marker of calls, before their end."""
    AFTER_CALLS = auto()
    """Behind calls, before their end marker."""


class MarkedCallParser(SteppingParser):
    """Output parser of calls between a begin marker and an end marker.

    A call whose name cannot be read is content, with its marker. If a call is malformed after its
    name, the rest of it up to the end marker is left out.
    """

    def __init__(
        self, *, begin: Sequence[str], end: str, ignored: Sequence[str] = (), reader: MakeReader
    ) -> None:
        """Create a parser. `begin`: markers that begin calls. `end`: marker behind them; "" for
        none. `ignored`: markers that are left out, such as those around a section of calls.
        `reader`: makes the reader of the text behind a begin marker."""
        super().__init__()
        self._begin, self._end, self._ignored, self._make = begin, end, ignored, reader
        self._state = _MarkedCallState.CONTENT
        self._content = ContentText()
        self._num_calls = 0
        """Number of calls before the present marker."""
        self._reader: CallReader = reader(0)
        self._raw = ""
        """The marker and the text behind it, as long as no call behind it has a name."""

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        match self._state:
            case _MarkedCallState.CALLS if self._reader.num_calls == 0:
                self._content.push_text(self._raw, events)
            case _MarkedCallState.CONTENT:
                self._content.push_text(self._text.take_all(), events)
        self._content.flush(events)
        return events

    def _step(self, events: list[OutputEvent]) -> bool:
        """Process text in the present state. Return whether the state has changed."""
        match self._state:
            case _MarkedCallState.CONTENT:
                before, marker = self._text.take_until(*self._begin, *self._ignored)
                self._content.push_text(before, events)
                if marker in self._begin:
                    self._state = _MarkedCallState.CALLS
                    self._reader, self._raw = self._make(self._num_calls), marker
                elif marker:
                    self._content.record_call()
                return bool(marker)
            case _MarkedCallState.CALLS:
                return self._read_calls(events)
            case _MarkedCallState.AFTER_CALLS:
                return self._skip_rest()

    def _read_calls(self, events: list[OutputEvent]) -> bool:
        text = self._text.take_all()
        had_call = self._reader.num_calls > 0
        try:
            rest = self._reader.read(text, events)
        except MalformedCallError as error:
            if self._reader.num_calls:
                return self._end_calls(text[error.position :])
            self._content.push_text(self._raw + text[: error.position], events)
            self._text.push_back(text[error.position :])
            self._state = _MarkedCallState.CONTENT
            return True
        if self._reader.num_calls == 0:
            self._raw += text
        elif not had_call:
            self._raw = ""
        if self._reader.is_done:
            return self._end_calls(rest)
        return False

    def _end_calls(self, rest: str) -> bool:
        self._text.push_back(rest)
        self._num_calls += self._reader.num_calls
        self._content.record_call()
        self._state = _MarkedCallState.AFTER_CALLS if self._end else _MarkedCallState.CONTENT
        return True

    def _skip_rest(self) -> bool:
        """Leave out the text up to the end marker, or up to a begin marker if the end marker is
        missing."""
        _, marker = self._text.take_until(self._end, *self._begin)
        if marker in self._begin:
            self._text.push_back(marker)
        if marker:
            self._state = _MarkedCallState.CONTENT
        return bool(marker)
