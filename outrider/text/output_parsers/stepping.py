"""Base class of output parsers that process their text in steps."""

from __future__ import annotations

from abc import ABC, abstractmethod

from outrider.text.output_parsers.events import OutputEvent
from outrider.text.output_parsers.markers import MarkedText


class SteppingParser(ABC):
    """An `OutputParser` that is a state machine: each step processes text in the present state."""

    def __init__(self) -> None:
        self._text = MarkedText()

    def push_text(self, text: str) -> list[OutputEvent]:
        """See `OutputParser`."""
        self._text.push_text(text)
        events: list[OutputEvent] = []
        while self._step(events):
            pass
        return events

    @abstractmethod
    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""

    @abstractmethod
    def _step(self, events: list[OutputEvent]) -> bool:
        """Process text in the present state, and append what is complete to `events`. Return
        whether there is more to do with the same text."""
