"""Output parser of tool calls with which an answer begins, without a marker of their own."""

from __future__ import annotations

from enum import Enum, auto

from outrider.text.output_parsers.call_readers import CallReader, MakeReader
from outrider.text.output_parsers.content import ContentText
from outrider.text.output_parsers.events import OutputEvent
from outrider.text.output_parsers.json_value import MalformedCallError
from outrider.text.output_parsers.markers import HeldText, is_separator
from outrider.text.output_parsers.stepping import SteppingParser


class _LeadingState(Enum):
    BEGIN = auto()
    CALLS = auto()
    AFTER_CALLS = auto()
    CONTENT = auto()


class LeadingCallParser(SteppingParser):
    """Output parser of answers that are either calls or content.

    An answer whose first character is `opening`, or that begins with `marker`, is read as calls. If
    that fails before a call begins, the text behind the call before it is content, and so is all
    further text.
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
        self._raw = HeldText()
        """Text behind the last call that is content if no call begins with it."""

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        is_undecided = self._state is _LeadingState.CALLS and not self._reader.is_in_call
        if is_undecided or self._state is _LeadingState.BEGIN:
            self._push_raw(self._text.take_all(), events)
        self._content.flush(events)
        return events

    def _step(self, events: list[OutputEvent]) -> bool:
        """Process text in the present state. Return whether the state has changed."""
        match self._state:
            case _LeadingState.BEGIN:
                return self._begin(events)
            case _LeadingState.CALLS:
                return self._read_calls(events)
            case _LeadingState.AFTER_CALLS:
                self._text.take_space()
                prefix = self._text.take_prefix(self._separator, self._opening)
                if prefix is None:
                    return False
                if prefix:
                    self._begin_calls(prefix)
                else:
                    self._state = _LeadingState.CONTENT
                return True
            case _LeadingState.CONTENT:
                self._content.push_text(self._text.take_all(), events)
                return False

    def _begin(self, events: list[OutputEvent]) -> bool:
        self._raw.push_text(self._text.take_space())
        prefix = self._text.take_prefix(self._opening, *filter(None, [self._marker]))
        if prefix is None:
            return False
        if prefix:
            self._begin_calls(prefix)
        else:
            self._push_raw("", events)
            self._state = _LeadingState.CONTENT
        return True

    def _begin_calls(self, prefix: str) -> None:
        """Begin to read calls behind a prefix, which is the first character of a call, or text
        before it."""
        if prefix == self._opening:
            self._text.move_to(self._text.position - len(prefix))
        else:
            self._raw.push_text(prefix)
        self._reader, self._state = self._make(self._num_calls), _LeadingState.CALLS

    def _read_calls(self, events: list[OutputEvent]) -> bool:
        text, start = self._text.text, self._text.position
        is_malformed = False
        try:
            position = self._reader.read(text, start, events)
        except MalformedCallError as error:
            position, is_malformed = error.position, True
        self._text.move_to(position)
        if self._reader.is_in_call:
            self._raw.take_all()
        else:
            self._raw.push_text(text[start:position])
        if is_malformed:
            self._state = _LeadingState.CONTENT
            if self._reader.num_calls:
                self._content.record_call()
            self._content.push_text(self._raw.take_all(), events)
            return True
        if not self._reader.is_done:
            return position > start
        self._raw.take_all()
        self._num_calls += self._reader.num_calls
        self._content.record_call()
        self._state = _LeadingState.AFTER_CALLS if self._separator else _LeadingState.CONTENT
        return True

    def _push_raw(self, text: str, events: list[OutputEvent]) -> None:
        """Pass on the text that is no call as content. A separator of calls that nothing follows is
        left out."""
        raw = self._raw.take_all() + text
        has_calls = self._num_calls + self._reader.num_calls > 0
        if not has_calls or not is_separator(raw, self._separator):
            self._content.push_text(raw, events)
