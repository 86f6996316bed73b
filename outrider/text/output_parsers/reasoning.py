"""Output parser of reasoning between tags, such as `<think>` and `</think>`."""

from __future__ import annotations

from enum import Enum, auto

from outrider.text.output_parsers.events import OutputEvent, OutputParser, ReasoningDelta
from outrider.text.output_parsers.stepping import SteppingParser


class _ReasoningState(Enum):
    BEGIN = auto()
    """Before the first character that is no white space."""
    REASONING_BEGIN = auto()
    """Behind the open tag, in white space."""
    REASONING = auto()
    CONTENT_BEGIN = auto()
    """Behind the close tag, in white space."""
    CONTENT = auto()


class TaggedReasoningParser(SteppingParser):
    """Splits an answer into reasoning between tags at its beginning, and the rest.

    The rest goes through another parser. White space around the reasoning is left out.
    """

    def __init__(
        self, open_tag: str, close_tag: str, *, is_open: bool, content: OutputParser
    ) -> None:
        """Create a parser. `is_open`: whether the prompt ended with the open tag, so that the
        answer begins with reasoning. `content`: parser of the text behind the reasoning."""
        super().__init__()
        self._open, self._close = open_tag, close_tag
        self._content = content
        self._space = ""
        """White space at the end of the reasoning so far."""
        self._state = _ReasoningState.REASONING_BEGIN if is_open else _ReasoningState.BEGIN

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun and its end was not seen."""
        return self._state in (_ReasoningState.REASONING_BEGIN, _ReasoningState.REASONING)

    def push_text(self, text: str) -> list[OutputEvent]:
        """See `OutputParser`."""
        if self._state is _ReasoningState.CONTENT:
            return self._content.push_text(text)
        return super().push_text(text)

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        rest = self._text.take_all()
        if self.is_reasoning:
            self._add_reasoning(rest, events)
        elif self._state is _ReasoningState.BEGIN:
            events += self._content.push_text(self._space + rest)
        return events + self._content.flush()

    def _step(self, events: list[OutputEvent]) -> bool:
        """Process text in the present state. Return whether the state has changed."""
        match self._state:
            case _ReasoningState.BEGIN:
                self._space += self._text.take_space()
                prefix = self._text.take_prefix(self._open)
                if prefix is None:
                    return False
                self._state = _ReasoningState.REASONING_BEGIN if prefix else _ReasoningState.CONTENT
                if not prefix:
                    events += self._content.push_text(self._space + self._text.take_all())
                self._space = ""
                return bool(prefix)
            case _ReasoningState.REASONING_BEGIN | _ReasoningState.CONTENT_BEGIN:
                self._text.take_space()
                if not len(self._text):
                    return False
                is_reasoning = self._state is _ReasoningState.REASONING_BEGIN
                self._state = _ReasoningState.REASONING if is_reasoning else _ReasoningState.CONTENT
                return True
            case _ReasoningState.REASONING:
                text, marker = self._text.take_until(self._close)
                self._add_reasoning(text, events)
                if marker:
                    self._state, self._space = _ReasoningState.CONTENT_BEGIN, ""
                return bool(marker)
            case _ReasoningState.CONTENT:
                events += self._content.push_text(self._text.take_all())
                return False

    def _add_reasoning(self, text: str, events: list[OutputEvent]) -> None:
        kept = text.rstrip()
        if kept:
            events.append(ReasoningDelta(self._space + kept))
            self._space = ""
        self._space += text[len(kept) :]
