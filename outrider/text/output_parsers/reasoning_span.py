"""Finds where the reasoning of an answer begins and ends, without changing the text."""

from __future__ import annotations

from enum import Enum, auto

from outrider.text.output_parsers.markers import MarkedText


class _SpanState(Enum):
    UNDECIDED = auto()
    """Before the first character that decides whether there is reasoning."""
    REASONING = auto()
    ANSWER = auto()


class ReasoningSpan:
    """Divides the text of one answer into reasoning, with its tags, and the answer behind it.

    Stop strings apply to the answer only, and tokens of reasoning are counted apart.
    """

    def __init__(self, open_tag: str, close_tag: str, *, is_open: bool) -> None:
        """Create a span; `is_open`: whether the answer begins with reasoning."""
        self._open, self._close = open_tag, close_tag
        self._text = MarkedText()
        self._state = _SpanState.REASONING if is_open else _SpanState.UNDECIDED

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends with reasoning."""
        return self._state is _SpanState.REASONING

    @property
    def has_ended(self) -> bool:
        """Whether all further text belongs to the answer."""
        return self._state is _SpanState.ANSWER

    def push_text(self, text: str) -> list[tuple[str, bool]]:
        """Add text and return the parts of the text that are decided: each with whether it is
        reasoning. Together they are the text that was added, apart from what is held back."""
        self._text.push_text(text)
        parts: list[tuple[str, bool]] = []
        if self._state is _SpanState.UNDECIDED:
            space = self._text.take_space()
            prefix = self._text.take_prefix(self._open)
            self._text.push_back(space + (prefix or ""))
            if prefix is None or (not prefix and len(self._text) == len(space)):
                return parts
            self._state = _SpanState.REASONING if prefix else _SpanState.ANSWER
        if self._state is _SpanState.REASONING:
            reasoning, marker = self._text.take_until(self._close)
            if reasoning or marker:
                parts.append((reasoning + marker, True))
            if marker:
                self._state = _SpanState.ANSWER
        if self._state is _SpanState.ANSWER and len(self._text):
            parts.append((self._text.take_all(), False))
        return parts

    def flush(self) -> tuple[str, bool]:
        """Return the text that was held back, at the end, and whether it is reasoning."""
        return self._text.take_all(), self.is_reasoning
