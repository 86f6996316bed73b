"""Content of an answer beside its tool calls, without the white space that separates them."""

from __future__ import annotations

from outrider.text.output_parsers.events import ContentDelta, OutputEvent
from outrider.text.output_parsers.markers import HeldText


class ContentText:
    """Passes content on. White space directly before and after tool calls is left out."""

    def __init__(self) -> None:
        self._space = HeldText()
        """White space at the end of the content so far, which a tool call may follow."""
        self._follows_call = False

    def push_text(self, text: str, events: list[OutputEvent]) -> None:
        """Add content, and append what is certain to be content to `events`."""
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        kept = text.rstrip()
        if kept:
            events.append(ContentDelta(self._space.take_all() + kept))
        self._space.push_text(text[len(kept) :])

    def record_call(self) -> None:
        """Record that a tool call begins here."""
        self._space.take_all()
        self._follows_call = True

    def flush(self, events: list[OutputEvent]) -> None:
        """Append the white space at the end of an answer that does not end with a tool call."""
        if len(self._space):
            events.append(ContentDelta(self._space.take_all()))
