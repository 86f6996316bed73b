"""Output parser of answers in which no tool calls are looked for."""

from __future__ import annotations

from outrider.text.output_parsers.events import ContentDelta, OutputEvent


class PlainContentParser:
    """Output parser of answers without tool calls: all text is content."""

    def push_text(self, text: str) -> list[OutputEvent]:
        """See `OutputParser`."""
        return [ContentDelta(text)] if text else []

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        return []
