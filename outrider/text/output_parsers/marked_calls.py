"""Output parser of tool calls that begin with a marker."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from outrider.text.output_parsers.call_readers import CallReader, MakeReader
from outrider.text.output_parsers.content import ContentText
from outrider.text.output_parsers.events import OutputEvent
from outrider.text.output_parsers.json_value import MalformedCallError
from outrider.text.output_parsers.markers import MAX_HELD_CHARS, HeldText, is_separator
from outrider.text.output_parsers.stepping import SteppingParser


class _MarkedCallState(Enum):
    CONTENT = auto()
    CALLS = auto()
    """Behind the marker of calls, before their end."""
    AFTER_CALLS = auto()
    """Behind calls, before their end marker."""


class MarkedCallParser(SteppingParser):
    """Output parser of calls between a begin marker and an end marker.

    A call whose name cannot be read is content, with its marker if no call is between them. Text
    between a call and its end marker is left out: it is the rest of a malformed call. Without an
    end marker in the next `MAX_HELD_CHARS` characters, this text is content.

    Calls of tools that the request does not have are passed on, as vLLM does: the markers say that
    the model means a call, and the client can tell the model that there is no such tool.
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
        self._held = HeldText()
        """Text that may be content: the marker, or the end of a call, and the text behind it, as
        long as the next call has not begun; then the text behind the calls, as long as there is no
        end marker."""

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        has_calls = self._state is _MarkedCallState.CALLS and self._reader.num_calls > 0
        if has_calls:
            self._content.record_call()
        rest = self._held.take_all() + self._text.take_all()
        # An array of calls may end behind a comma.
        if not has_calls or not (self._reader.is_in_call or is_separator(rest)):
            self._content.push_text(rest, events)
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
                    self._reader = self._make(self._num_calls)
                    self._held.push_text(marker)
                elif marker:
                    self._content.record_call()
                return bool(marker)
            case _MarkedCallState.CALLS:
                return self._read_calls(events)
            case _MarkedCallState.AFTER_CALLS:
                return self._skip_rest(events)

    def _read_calls(self, events: list[OutputEvent]) -> bool:
        text, start = self._text.text, self._text.position
        is_malformed = False
        try:
            position = self._reader.read(text, start, events)
        except MalformedCallError as error:
            position, is_malformed = error.position, True
        self._text.move_to(position)
        if self._reader.is_in_call:
            self._held.take_all()
        else:
            self._held.push_text(text[start:position])
        if not is_malformed and not self._reader.is_done:
            return position > start
        if self._reader.num_calls:
            self._content.record_call()
        self._num_calls += self._reader.num_calls
        rest = self._held.take_all()
        if is_malformed and not self._reader.is_in_call:
            self._content.push_text(rest, events)
            self._state = _MarkedCallState.CONTENT
            return True
        self._state = _MarkedCallState.AFTER_CALLS if self._end else _MarkedCallState.CONTENT
        return True

    def _skip_rest(self, events: list[OutputEvent]) -> bool:
        """Leave out the text up to the end marker. If another marker comes first, or too much text,
        the text is content."""
        start = self._text.position
        before, marker = self._text.take_until(self._end, *self._begin, *self._ignored)
        free = MAX_HELD_CHARS - len(self._held)
        is_too_long = len(before) > free
        if is_too_long:
            before, marker = before[:free], ""
            self._text.move_to(start + free)
        self._held.push_text(before)
        if not marker and not is_too_long:
            return False
        if marker == self._end:
            self._held.take_all()
        else:
            self._text.move_to(self._text.position - len(marker))
            self._content.push_text(self._held.take_all(), events)
        self._state = _MarkedCallState.CONTENT
        return True
