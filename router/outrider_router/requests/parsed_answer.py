"""Answer of a chat request, split into reasoning, content and tool calls on its way to the client.

Inside of the router an answer is the text as the model wrote it, so that it can be resumed at any
character. `ParsedAnswer` stands between this text and one client's call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final

from outrider.ids import RequestId
from outrider.spec.tools import OutputParsing, ToolCallDelta, join_call_deltas
from outrider.text.output_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallStart,
)
from outrider.text.output_parsers.formats import TOOL_FORMATS, output_format_of
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateResult,
    PromptInfo,
    StreamEvent,
    StreamPosition,
)

EventWriter = Callable[[StreamEvent], Awaitable[None]]
"""Function that sends one message to a client; any exception means that the client is gone."""
END_OF_TEXT: Final = 1 << 30
"""Added to the characters of a position behind the text that was held back at the end, which no
characters of the unparsed answer stand for."""
_PART_CHARS: Final = 256
"""Maximum number of characters that a parser gets at once."""
_ID_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def make_call_id(request_id: RequestId, index: int, *, is_short: bool) -> str:
    """Return the id of a tool call. It depends on the request and the index of the call only, so
    that a resumed stream has the same ids. A short id has 9 letters and digits."""
    number = int.from_bytes(hashlib.sha256(f"{request_id} {index}".encode()).digest(), "big")
    digits = ""
    for _ in range(9 if is_short else 24):
        number, digit = divmod(number, len(_ID_DIGITS))
        digits += _ID_DIGITS[digit]
    return digits if is_short else f"call_{digits}"


class _DeltaParts:
    """Reasoning, content and calls of a delta that is being put together."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[ToolCallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def follows(self, event: OutputEvent) -> bool:
        """Return whether the part has something that readers of a delta take for later than the
        event: they read reasoning, content and calls in this order."""
        match event:
            case ReasoningDelta():
                return bool(self.text or self.calls)
            case ContentDelta():
                return bool(self.calls)
            case _:
                return False

    def add(self, delta: ToolCallDelta) -> None:
        """Add a part of a call. Clients take two entries with one index for two calls."""
        if self.calls and self.calls[-1].index == delta.index:
            arguments = self.calls[-1].arguments + delta.arguments
            self.calls[-1] = replace(self.calls[-1], arguments=arguments)
        else:
            self.calls.append(delta)

    def to_delta(self, characters: int) -> Delta:
        """Return the delta, whose position in the unparsed answer is `characters`."""
        return Delta(
            text=self.text,
            reasoning=self.reasoning,
            tool_calls=tuple(self.calls),
            token_ids=(),
            characters=characters,
        )


class AnswerParser:
    """Splits the deltas of one answer."""

    def __init__(self, request_id: RequestId, parsing: OutputParsing) -> None:
        """Create the parser of the answer to a request."""
        output_format = output_format_of(parsing.tool_format, parsing.reasoning_format)
        self._parser = output_format.make_parser(is_reasoning_open=parsing.is_reasoning_open)
        self._request_id, self._parsing = request_id, parsing
        tools = TOOL_FORMATS.get(parsing.tool_format)
        self._has_short_ids = tools is not None and tools.has_short_ids
        self._characters = 0
        """Number of characters of the unparsed answer so far."""
        self._has_ended = False
        """Whether the text that was held back at the end was returned."""

    def skip_text(self, text: str, *, has_ended: bool) -> None:
        """Add text that the client has received already; `has_ended`: with the text that was held
        back at the end."""
        self._characters += len(text)
        for part in _cut(text, _PART_CHARS):
            self._parser.push_text(part)
        self._has_ended = has_ended

    def parse_delta(self, delta: Delta) -> list[Delta]:
        """Return the deltas to send for a delta of the unparsed answer: usually one. Several keep
        the order of content and calls, and a stream can be resumed after each."""
        deltas: list[Delta] = []
        part, position = _DeltaParts(), self._characters
        # The position of a part must be known exactly, or text would be lost on resumption.
        size = 1 if len(delta.text) <= _PART_CHARS else _PART_CHARS
        for text in _cut(delta.text, size):
            events = self._parser.push_text(text)
            if events and part.follows(events[0]):
                deltas.append(part.to_delta(position))
                part = _DeltaParts()
            self._add(part, events)
            position += len(text)
        self._characters = position
        if part or not deltas:
            deltas.append(part.to_delta(position))
        deltas[0] = replace(deltas[0], token_ids=delta.token_ids, logprobs=delta.logprobs)
        deltas[-1] = replace(deltas[-1], characters=position)
        return deltas

    def flush(self) -> list[Delta]:
        """Return the last delta of the answer, with the text that was held back; none if there is
        none, or if the client has received it."""
        part = _DeltaParts()
        if not self._has_ended:
            self._add(part, self._parser.flush())
        self._has_ended = True
        return [part.to_delta(self._characters + END_OF_TEXT)] if part else []

    def _add(self, part: _DeltaParts, events: list[OutputEvent]) -> None:
        for event in events:
            match event:
                case ReasoningDelta():
                    part.reasoning += event.text
                case ContentDelta():
                    part.text += event.text
                case _ if event.index and not self._parsing.parallel:
                    pass
                case ToolCallStart():
                    call_id = make_call_id(
                        self._request_id, event.index, is_short=self._has_short_ids
                    )
                    part.add(ToolCallDelta(index=event.index, call_id=call_id, name=event.name))
                case ArgumentsDelta():
                    part.add(ToolCallDelta(index=event.index, arguments=event.text))


def _cut(text: str, size: int) -> Iterator[str]:
    """Yield the parts of a text of `size` characters each. Parsers may take a time that grows with
    the square of the length of a part."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


class ParsedAnswer:
    """Writer of one client's call, which passes a parsed answer on. Answers without a format to
    parse pass unchanged."""

    def __init__(
        self, write: EventWriter, resume: Callable[[], AnswerParser | None] | None = None
    ) -> None:
        """Create the writer of a call. `resume`: returns the parser of a stream that is resumed
        after its first message, when its first new message comes; None for other streams."""
        self._write, self._resume = write, resume
        self._parser: AnswerParser | None = None

    async def __call__(self, event: StreamEvent) -> None:
        """Pass a message on."""
        if isinstance(event, PromptInfo):
            if event.parsing is not None:
                self._parser = AnswerParser(event.request_id, event.parsing)
            await self._write(event)
            return
        if self._resume is not None:
            self._parser, self._resume = self._resume(), None
        if self._parser is None:
            await self._write(event)
            return
        if isinstance(event, Delta):
            deltas = self._parser.parse_delta(event)
        else:
            deltas = self._parser.flush()
        for delta in deltas:
            await self._write(delta)
        if isinstance(event, FinishInfo):
            await self._write(event)


def split_position(position: StreamPosition) -> tuple[StreamPosition, bool]:
    """Return a client's position in the unparsed answer, and whether the client has received the
    text that was held back at the end, too."""
    has_ended = position.characters >= END_OF_TEXT
    if not has_ended:
        return position, False
    return replace(position, characters=position.characters - END_OF_TEXT), True


def parse_result(result: GenerateResult, parsing: OutputParsing | None) -> GenerateResult:
    """Return a complete answer that is split."""
    if parsing is None:
        return result
    parser = AnswerParser(result.request_id, parsing)
    deltas = parser.parse_delta(Delta(text=result.text, token_ids=())) + parser.flush()
    return GenerateResult(
        request_id=result.request_id,
        model=result.model,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=join_call_deltas(call for delta in deltas for call in delta.tool_calls),
        token_ids=result.token_ids,
        finish=result.finish,
        logprobs=result.logprobs,
        prompt_token_ids=result.prompt_token_ids,
    )
