"""Output parser of OpenAI's harmony format, in which gpt-oss models answer.

An answer is a sequence of messages. A message has a header, with a channel and perhaps a recipient,
and a body:

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>

The channel "analysis" holds reasoning. A message to a recipient `functions.NAME` is a tool call.
Every other message is content. Source of the format: OpenAI's guide "OpenAI harmony response
format".
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from outrider.text.output_parsers.content import ContentText
from outrider.text.output_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallStart,
)
from outrider.text.output_parsers.json_call import MAX_NAME_CHARS
from outrider.text.output_parsers.stepping import SteppingParser

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
"""Texts of the special tokens of the format."""
MAX_HEADER_CHARS: Final = 1024
"""Maximum length of a header; the rest is left out."""
_RECIPIENT: Final = re.compile(rf"\bto=functions\.([^\s<]{{1,{MAX_NAME_CHARS}}})")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


class _MessageState(Enum):
    BEGIN = auto()
    """Outside of messages, where text is content."""
    HEADER = auto()
    BODY = auto()


class HarmonyParser(SteppingParser):
    """Output parser of the harmony format; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _MessageState.BEGIN
        self._header = ""
        self._is_reasoning = False
        self._call: int | None = None
        """Index of the call whose arguments the body is; None for other bodies."""
        self._num_calls = 0
        self._has_arguments = False
        self._outside = ContentText()
        """Text outside of messages."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the present message is reasoning."""
        return self._state is _MessageState.BODY and self._is_reasoning

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        if self._state is not _MessageState.HEADER:
            self._add(self._text.take_all(), events)
        self._end_body(events)
        self._outside.flush(events)
        return events

    def _step(self, events: list[OutputEvent]) -> bool:
        """Process text up to the next marker. Return whether there was one."""
        text, marker = self._text.take_until(*MARKERS)
        if self._state is _MessageState.HEADER:
            self._header = (self._header + text)[:MAX_HEADER_CHARS]
        else:
            self._add(text, events)
        if marker:
            self._outside.record_call()
        if marker == MESSAGE:
            self._begin_body(events)
        elif marker in (START, CHANNEL):
            self._end_body(events)
            if self._state is not _MessageState.HEADER:
                self._header, self._state = "", _MessageState.HEADER
            self._header = (self._header + marker)[:MAX_HEADER_CHARS]
        elif marker in ENDS:
            self._end_body(events)
            self._state = _MessageState.BEGIN
        return bool(marker)

    def _begin_body(self, events: list[OutputEvent]) -> None:
        self._end_body(events)
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        self._is_reasoning = recipient is None and channel is not None and channel[1] == "analysis"
        self._call = None
        if recipient is not None:
            self._call, self._has_arguments = self._num_calls, False
            self._num_calls += 1
            events.append(ToolCallStart(self._call, recipient[1]))
        self._state = _MessageState.BODY

    def _add(self, text: str, events: list[OutputEvent]) -> None:
        if not text:
            return
        if self._state is _MessageState.BEGIN:
            self._outside.push_text(text, events)
        elif self._call is not None:
            self._has_arguments = True
            events.append(ArgumentsDelta(self._call, text))
        elif self.is_reasoning:
            events.append(ReasoningDelta(text))
        else:
            events.append(ContentDelta(text))

    def _end_body(self, events: list[OutputEvent]) -> None:
        if self._call is not None and not self._has_arguments:
            events.append(ArgumentsDelta(self._call, "{}"))
        self._call = None
