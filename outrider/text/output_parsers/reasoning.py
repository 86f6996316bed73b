"""Output parser of reasoning between tags, such as `<think>` and `</think>`."""

from __future__ import annotations

from outrider.text.output_parsers.events import OutputEvent, OutputParser, ReasoningDelta
from outrider.text.output_parsers.markers import HeldText
from outrider.text.output_parsers.reasoning_span import TaggedSpan


class TaggedReasoningParser:
    """`OutputParser` that splits an answer into reasoning between tags at its beginning, and the
    rest.

    The rest goes through another parser. White space around the reasoning is left out.
    """

    def __init__(
        self, open_tag: str, close_tag: str, *, is_open: bool, content: OutputParser
    ) -> None:
        """Create a parser. `is_open`: whether the prompt ended with the open tag, so that the
        answer begins with reasoning. `content`: parser of the text behind the reasoning."""
        self._span = TaggedSpan(open_tag, close_tag, is_open=is_open)
        self._close, self._content = close_tag, content
        self._awaits_open_tag = not is_open
        self._awaits_text = is_open
        """Whether white space is left out, because the reasoning or its end was just before it."""
        self._space = HeldText()
        """White space at the end of the reasoning so far."""

    def push_text(self, text: str) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        for part, is_reasoning in self._span.push_text(text):
            self._add(part, is_reasoning, events)
        return events

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        self._add(*self._span.flush(), events)
        return events + self._content.flush()

    def _add(self, part: str, is_reasoning: bool, events: list[OutputEvent]) -> None:
        is_tag = is_reasoning and (self._awaits_open_tag or part == self._close)
        self._awaits_open_tag = False
        if is_tag:
            self._awaits_text = True
            return
        if self._awaits_text:
            part = part.lstrip()
            self._awaits_text = not part
        if not is_reasoning:
            events += self._content.push_text(part)
            return
        kept = part.rstrip()
        if kept:
            events.append(ReasoningDelta(self._space.take_all() + kept))
        self._space.push_text(part[len(kept) :])
