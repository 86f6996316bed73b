"""Finds where the reasoning of an answer begins and ends, without changing the text."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from outrider.text.output_parsers.markers import HeldText, MarkedText


class ReasoningSpan(Protocol):
    """Divides the text of one answer into reasoning, with its tags, and the answer itself.

    Stop strings apply to the answer only, and tokens of reasoning are counted apart.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends with reasoning."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether all further text belongs to the answer. No text is held back then."""
        ...

    def push_text(self, text: str) -> list[tuple[str, bool]]:
        """Add text and return the parts of the text that are decided: each with whether it is
        reasoning. Together they are the text that was added, apart from what is held back."""
        ...

    def flush(self) -> tuple[str, bool]:
        """Return the text that was held back, at the end, and whether it is reasoning."""
        ...


class _SpanState(Enum):
    UNDECIDED = auto()
    """Before the first character that decides whether there is reasoning."""
    REASONING = auto()
    ANSWER = auto()


class TaggedSpan:
    """`ReasoningSpan` of reasoning between two tags at the beginning of the answer. The open tag,
    with the white space before it, is one part, and so is the close tag."""

    def __init__(self, open_tag: str, close_tag: str, *, is_open: bool) -> None:
        """Create a span; `is_open`: whether the prompt ended with the open tag, so that the answer
        begins with reasoning."""
        self._open, self._close = open_tag, close_tag
        self._text, self._space = MarkedText(), HeldText()
        self._state = _SpanState.REASONING if is_open else _SpanState.UNDECIDED

    @property
    def is_reasoning(self) -> bool:
        """See `ReasoningSpan`."""
        return self._state is _SpanState.REASONING

    @property
    def has_ended(self) -> bool:
        """See `ReasoningSpan`."""
        return self._state is _SpanState.ANSWER

    def push_text(self, text: str) -> list[tuple[str, bool]]:
        """See `ReasoningSpan`."""
        self._text.push_text(text)
        parts: list[tuple[str, bool]] = []
        if self._state is _SpanState.UNDECIDED:
            self._space.push_text(self._text.take_space())
            prefix = self._text.take_prefix(self._open)
            if prefix is None:
                return parts
            self._state = _SpanState.REASONING if prefix else _SpanState.ANSWER
            parts.append((self._space.take_all() + prefix, bool(prefix)))
        if self._state is _SpanState.REASONING:
            reasoning, marker = self._text.take_until(self._close)
            parts += [(reasoning, True), (marker, True)]
            if marker:
                self._state = _SpanState.ANSWER
        if self._state is _SpanState.ANSWER:
            parts.append((self._text.take_all(), False))
        return [part for part in parts if part[0]]

    def flush(self) -> tuple[str, bool]:
        """See `ReasoningSpan`."""
        return self._space.take_all() + self._text.take_all(), self.is_reasoning
