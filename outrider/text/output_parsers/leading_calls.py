"""Output parser of tool calls with which an answer begins, without a marker of their own."""

from __future__ import annotations

from enum import Enum, auto

from outrider.text.output_parsers.call_readers import CallReader, MakeReader
from outrider.text.output_parsers.content import ContentText
from outrider.text.output_parsers.events import OutputEvent
from outrider.text.output_parsers.json_value import MalformedCallError
from outrider.text.output_parsers.stepping import SteppingParser


class _LeadingState(Enum):
    BEGIN = auto()
    CALLS = auto()
    AFTER_CALLS = auto()
    CONTENT = auto()


class LeadingCallParser(SteppingParser):
    """Output parser of answers that are either calls or content.

    An answer whose first character is `opening`, or that begins with `marker`, is read as calls. If
    that fails before the first call has a name, it is content.
    """

    def __init__(
        self, *, opening: str, marker: str = "", separator: str = "", reader: MakeReader
    ) -> None:
        """Create a parser. `marker`: text that may precede calls; "" for none. `separator`:
        character between calls; "" if `reader` reads all of them."""
        super().__init__()
        self._opening, self._marker, self._separator = opening, marker, separator
        self._make = reader
        self._reader: CallReader = reader(0)
        self._state = _LeadingState.BEGIN
        self._content = ContentText()
        self._num_calls = 0
        """Number of calls before those that are being read."""
        self._raw = ""
        """Text that is content if no call begins with it."""

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        is_call = self._num_calls + self._reader.num_calls > 0
        if self._state in (_LeadingState.BEGIN, _LeadingState.CALLS) and not is_call:
            self._content.push_text(self._raw + self._text.take_all(), events)
        self._content.flush(events)
        return events

    def _step(self, events: list[OutputEvent]) -> bool:
        """Process text in the present state. Return whether the state has changed."""
        match self._state:
            case _LeadingState.BEGIN:
                return self._begin()
            case _LeadingState.CALLS:
                return self._read_calls(events)
            case _LeadingState.AFTER_CALLS:
                self._text.take_space()
                prefix = self._text.take_prefix(self._separator, self._opening)
                if not len(self._text) and not prefix:
                    return False
                if prefix:
                    self._text.push_back(prefix * (prefix == self._opening))
                    self._reader, self._state = self._make(self._num_calls), _LeadingState.CALLS
                else:
                    self._state = _LeadingState.CONTENT
                return True
            case _LeadingState.CONTENT:
                self._content.push_text(self._text.take_all(), events)
                return False

    def _begin(self) -> bool:
        self._raw += self._text.take_space()
        prefix = self._text.take_prefix(self._opening, *filter(None, [self._marker]))
        if prefix is None or (not prefix and not len(self._text)):
            return False
        if prefix == self._opening:
            self._text.push_back(prefix)
        elif prefix:
            self._raw += prefix
        else:
            self._text.push_back(self._raw)
        self._state = _LeadingState.CALLS if prefix else _LeadingState.CONTENT
        return True

    def _read_calls(self, events: list[OutputEvent]) -> bool:
        text = self._text.take_all()
        try:
            rest = self._reader.read(text, events)
        except MalformedCallError as error:
            self._state = _LeadingState.CONTENT
            if self._reader.num_calls + self._num_calls:
                self._content.record_call()
                self._text.push_back(text[error.position :])
            else:
                self._text.push_back(self._raw + text)
            return True
        if self._reader.num_calls + self._num_calls == 0:
            self._raw += text
        if not self._reader.is_done:
            return False
        self._num_calls += self._reader.num_calls
        self._content.record_call()
        self._text.push_back(rest)
        self._state = _LeadingState.AFTER_CALLS if self._separator else _LeadingState.CONTENT
        return True
