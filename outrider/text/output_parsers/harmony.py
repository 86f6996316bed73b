"""Output parser of OpenAI's harmony format, in which gpt-oss models answer.

An answer is a sequence of messages. A message has a header, with a channel and perhaps a recipient,
and a body:

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>

The recipient may also stand before the channel, behind the role (` to=functions.get_weather
<|channel|>commentary`). Because the prompt ends with `<|start|>assistant`, an answer may begin so.

The channel "analysis" holds reasoning. A message to a recipient `functions.NAME` is a tool call.
Every other message is content. Source of the format: OpenAI's guide "OpenAI harmony response
format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from outrider.text.output_parsers.markers import MarkedText

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
"""Texts of the special tokens of the format."""
MAX_HEADER_CHARS: Final = 1024
"""Maximum length of a header; the rest is left out."""
_RECIPIENT: Final = re.compile(rf"\bto=functions\.([^\s<]{{1,{MAX_NAME_CHARS}}})(?![^\s<])")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_FIRST_RECIPIENT: Final = re.compile(r"\s*(t(o(=\S*\s*)?)?)?")
"""The beginning of an answer that begins with a recipient."""


class HarmonyPart(Enum):
    """Meaning of a part of an answer in the harmony format."""

    ROLE = auto()
    """Beginning of an answer that may be a recipient, or text outside of messages."""
    MARKUP = auto()
    """Headers and markers."""
    REASONING = auto()
    CALL = auto()
    """Arguments of a tool call."""
    CONTENT = auto()
    OUTSIDE = auto()
    """Text outside of messages, which is content."""


class HarmonyReader:
    """Divides an answer into the bodies of messages, the markup and the text around them."""

    def __init__(self, *, reads_calls: bool = True, reads_reasoning: bool = True) -> None:
        """Create a reader. Without `reads_calls`, tool calls are content (or reasoning, in its
        channel); without `reads_reasoning`, reasoning is content."""
        self._reads_calls, self._reads_reasoning = reads_calls, reads_reasoning
        self._text = MarkedText()
        self._header = ""
        self.part = HarmonyPart.ROLE
        """Meaning of the text at the present position."""
        self.is_final = False
        """Whether the present position is in a message of the channel "final"."""
        self.recipient = ""
        """Name of the tool that the present message calls; "" for other messages."""

    def read(self, text: str) -> Iterator[tuple[str, HarmonyPart]]:
        """Add text, and yield its parts that are decided, with their meanings. The attributes are
        those behind the part that was yielded last."""
        self._text.push_text(text)
        while True:
            text, marker = self._text.take_until(*MARKERS)
            if self.part is HarmonyPart.ROLE:
                yield from self._read_role(text, marker)
            elif text:
                if self.part is HarmonyPart.MARKUP:
                    self._add_header(text)
                yield text, self.part
            if not marker:
                return
            self._pass_marker(marker)
            yield marker, HarmonyPart.MARKUP

    def take_rest(self) -> tuple[str, HarmonyPart]:
        """Return the text that is held back, or that was not read, and its meaning."""
        if self.part is HarmonyPart.ROLE:
            return self._header + self._text.take_all(), HarmonyPart.OUTSIDE
        return self._text.take_all(), self.part

    def _read_role(self, text: str, marker: str) -> Iterator[tuple[str, HarmonyPart]]:
        """Read text at the beginning of an answer: part of a header if it may be a recipient before
        a channel or a body, and text outside of messages otherwise."""
        self._header += text
        is_recipient = bool(_FIRST_RECIPIENT.fullmatch(self._header, 0, MAX_HEADER_CHARS + 1))
        if is_recipient and len(self._header) <= MAX_HEADER_CHARS:
            if not marker:
                return
            if marker not in (START, *ENDS):
                self.part = HarmonyPart.MARKUP
                if self._header:
                    yield self._header, HarmonyPart.MARKUP
                return
        self.part = HarmonyPart.OUTSIDE
        header, self._header = self._header, ""
        if header:
            yield header, HarmonyPart.OUTSIDE

    def _add_header(self, text: str) -> None:
        self._header = (self._header + text)[:MAX_HEADER_CHARS]

    def _pass_marker(self, marker: str) -> None:
        if marker == CONSTRAIN:
            if self.part is HarmonyPart.MARKUP:
                self._add_header(marker)
            return
        if marker == MESSAGE:
            self._begin_body()
            return
        if marker in ENDS:
            self._header, self.part = "", HarmonyPart.OUTSIDE
        else:
            if self.part is not HarmonyPart.MARKUP:
                self._header, self.part = "", HarmonyPart.MARKUP
            self._add_header(marker)
        self.recipient, self.is_final = "", False

    def _begin_body(self) -> None:
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        name = "" if channel is None else channel[1]
        self.recipient = ""
        if recipient is not None and self._reads_calls:
            self.part, self.recipient = HarmonyPart.CALL, recipient[1]
        elif name == "analysis" and self._reads_reasoning:
            self.part = HarmonyPart.REASONING
        else:
            self.part = HarmonyPart.CONTENT
        self.is_final = name == "final"


class HarmonyParser:
    """Output parser of the harmony format; see the module.

    Calls of tools that the request does not have are passed on, as `MarkedCallParser` does.
    """

    def __init__(self, *, reads_calls: bool = True, reads_reasoning: bool = True) -> None:
        """Create a parser; the parameters are those of `HarmonyReader`."""
        self._reader = HarmonyReader(reads_calls=reads_calls, reads_reasoning=reads_reasoning)
        self._num_calls = 0
        self._awaits_arguments = False
        """Whether the present message is a call whose arguments have not begun."""
        self._outside = ContentText()
        """Text outside of messages."""

    def push_text(self, text: str) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        for part, kind in self._reader.read(text):
            self._add(part, kind, events)
        return events

    def flush(self) -> list[OutputEvent]:
        """See `OutputParser`."""
        events: list[OutputEvent] = []
        part, kind = self._reader.take_rest()
        if part and kind is not HarmonyPart.MARKUP:
            self._add(part, kind, events)
        self._end_call(events)
        self._outside.flush(events)
        return events

    def _add(self, part: str, kind: HarmonyPart, events: list[OutputEvent]) -> None:
        match kind:
            case HarmonyPart.MARKUP:
                self._outside.record_call()
                if part in MARKERS and part != CONSTRAIN:
                    self._end_call(events)
                if part == MESSAGE and self._reader.recipient:
                    events.append(ToolCallStart(self._num_calls, self._reader.recipient))
                    self._num_calls += 1
                    self._awaits_arguments = True
            case HarmonyPart.CALL:
                self._awaits_arguments = False
                events.append(ArgumentsDelta(self._num_calls - 1, part))
            case HarmonyPart.REASONING:
                events.append(ReasoningDelta(part))
            case HarmonyPart.OUTSIDE | HarmonyPart.ROLE:
                self._outside.push_text(part, events)
            case HarmonyPart.CONTENT:
                events.append(ContentDelta(part))

    def _end_call(self, events: list[OutputEvent]) -> None:
        if self._awaits_arguments:
            events.append(ArgumentsDelta(self._num_calls - 1, "{}"))
            self._awaits_arguments = False


class HarmonySpan:
    """`ReasoningSpan` of the harmony format. The headers of messages count as reasoning, because
    stop strings do not apply to them."""

    def __init__(self) -> None:
        self._reader = HarmonyReader()
        self.has_ended = False
        """See `ReasoningSpan`: whether the final message has begun."""

    @property
    def is_reasoning(self) -> bool:
        """See `ReasoningSpan`."""
        return self._reader.part in (HarmonyPart.MARKUP, HarmonyPart.REASONING)

    def push_text(self, text: str) -> list[tuple[str, bool]]:
        """See `ReasoningSpan`."""
        parts: list[tuple[str, bool]] = []
        if self.has_ended:
            return [(text, False)]
        for part, kind in self._reader.read(text):
            is_reasoning = kind in (HarmonyPart.MARKUP, HarmonyPart.REASONING)
            if parts and parts[-1][1] == is_reasoning:
                parts[-1] = (parts[-1][0] + part, is_reasoning)
            else:
                parts.append((part, is_reasoning))
            if self._reader.is_final:
                self.has_ended = True
                parts.append((self._reader.take_rest()[0], False))
                break
        return [part for part in parts if part[0]]

    def flush(self) -> tuple[str, bool]:
        """See `ReasoningSpan`."""
        is_reasoning = self.is_reasoning
        return self._reader.take_rest()[0], is_reasoning
