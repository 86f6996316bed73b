"""Events of an output parser: pieces of reasoning, of content and of tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the reasoning, which models write before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of a tool call, as soon as the name of the tool is known."""

    index: int
    """Index of the call in the answer, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """New text of the arguments of a tool call. The texts of a call together are a JSON object if
    the model wrote one."""

    index: int
    text: str


OutputEvent = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Splits the text of one answer into events.

    The events do not depend on how the text was cut into pieces, apart from the cuts between deltas
    of the same kind. No text makes a parser fail: what is no valid call is content.
    """

    def push_text(self, text: str) -> list[OutputEvent]:
        """Add text and return the events that it completes. Text that may belong to a later event
        is held back."""
        ...

    def flush(self) -> list[OutputEvent]:
        """Return the remaining events at the end of the answer."""
        ...


def merge_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Join neighbouring deltas of the same kind and call, and leave out empty ones."""
    merged: list[OutputEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        match event, last:
            case ((ContentDelta("") | ReasoningDelta("") | ArgumentsDelta(_, "")), _):
                pass
            case ContentDelta(text), ContentDelta(before):
                merged[-1] = ContentDelta(before + text)
            case ReasoningDelta(text), ReasoningDelta(before):
                merged[-1] = ReasoningDelta(before + text)
            case ArgumentsDelta(index, text), ArgumentsDelta(other, before) if index == other:
                merged[-1] = ArgumentsDelta(index, before + text)
            case _:
                merged.append(event)
    return merged
