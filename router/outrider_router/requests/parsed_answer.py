"""Answer of a chat request, split into reasoning, content and tool calls on its way to the client.

Inside of the router an answer is the text as the model wrote it, so that it can be resumed at any
character. `ParsedAnswer` stands between this text and one client's call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
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
"""Maximum number of characters that a parser gets at once from a delta that is sent. A stream can
be resumed behind each of these parts."""
_ID_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_ID: Final = re.compile(r"[0-9A-Za-z]{9}")


def make_call_id(request_id: RequestId, seed: int, index: int, *, is_short: bool) -> str:
    """Return the id of a tool call. It depends only on the request, its `call_id_seed` and the
    index of the call, so that a resumed stream has the same ids. A short id has 9 letters and
    digits."""
    digits = _digest(f"{request_id} {seed} {index}", 9 if is_short else 24)
    return digits if is_short else f"call_{digits}"


def to_short_call_id(call_id: str) -> str:
    """Return the short id for a call id of a conversation: 9 letters and digits, as Mistral's
    templates demand. A short id stays the same, and equal ids have equal short ids. Clients that
    have changed the model send ids of other forms."""
    return call_id if _SHORT_ID.fullmatch(call_id) else _digest(call_id, 9)


def _digest(text: str, length: int) -> str:
    """Return so many letters and digits that depend on a text."""
    number = int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest(), "big")
    digits = ""
    for _ in range(length):
        number, digit = divmod(number, len(_ID_DIGITS))
        digits += _ID_DIGITS[digit]
    return digits


class _DeltaParts:
    """Reasoning, content and calls of a delta that is being put together, in pieces."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        """The first part of each call, and its arguments."""

    def __bool__(self) -> bool:
        return bool(self._text or self._reasoning or self._calls)

    def follows(self, event: OutputEvent) -> bool:
        """Return whether the part has something that readers of a delta take for later than the
        event: they read reasoning, content and calls in this order."""
        match event:
            case ReasoningDelta():
                return bool(self._text or self._calls)
            case ContentDelta():
                return bool(self._calls)
            case _:
                return False

    def add(self, event: ReasoningDelta | ContentDelta) -> None:
        """Add reasoning or content."""
        (self._text if isinstance(event, ContentDelta) else self._reasoning).append(event.text)

    def begin_call(self, delta: ToolCallDelta) -> None:
        """Add the first part of a call."""
        self._calls.append((delta, []))

    def add_arguments(self, event: ArgumentsDelta) -> None:
        """Add arguments of a call. Clients take two entries with one index for two calls."""
        if not event.text:
            return
        if not self._calls or self._calls[-1][0].index != event.index:
            self.begin_call(ToolCallDelta(index=event.index))
        self._calls[-1][1].append(event.text)

    def to_delta(self, characters: int) -> Delta:
        """Return the delta, whose position in the unparsed answer is `characters`."""
        return Delta(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(
                replace(first, arguments="".join(arguments)) for first, arguments in self._calls
            ),
            token_ids=(),
            characters=characters,
        )


class AnswerParser:
    """Splits the deltas of one answer."""

    def __init__(self, request_id: RequestId, parsing: OutputParsing) -> None:
        """Create the parser of the answer to a request."""
        output_format = output_format_of(parsing.tool_format, parsing.reasoning_format)
        self._parser = output_format.make_parser(
            is_reasoning_open=parsing.is_reasoning_open,
            names=frozenset(parsing.tool_names) if parsing.tool_names else None,
        )
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
        self._parser.push_text(text)
        self._has_ended = has_ended

    def parse_all(self, text: str) -> Delta:
        """Return the delta of a complete answer, which is not sent as a stream."""
        part = _DeltaParts()
        self._add(part, self._parser.push_text(text) + self._parser.flush())
        return part.to_delta(len(text))

    def parse_delta(self, delta: Delta) -> list[Delta]:
        """Return the deltas to send for a delta of the unparsed answer: usually one. Several keep
        the order of content and calls, and a stream can be resumed after each."""
        deltas: list[Delta] = []
        part, position = _DeltaParts(), self._characters
        # The position of a part must be known exactly, or text would be lost on resumption.
        size = 1 if len(delta.text) <= _PART_CHARS else _PART_CHARS
        for start in range(0, len(delta.text), size):
            text = delta.text[start : start + size]
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
                case ReasoningDelta() | ContentDelta():
                    part.add(event)
                case _ if event.index and not self._parsing.parallel:
                    pass
                case ToolCallStart():
                    call_id = make_call_id(
                        self._request_id,
                        self._parsing.call_id_seed,
                        event.index,
                        is_short=self._has_short_ids,
                    )
                    part.begin_call(
                        ToolCallDelta(index=event.index, call_id=call_id, name=event.name)
                    )
                case ArgumentsDelta():
                    part.add_arguments(event)


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
    delta = AnswerParser(result.request_id, parsing).parse_all(result.text)
    return GenerateResult(
        request_id=result.request_id,
        model=result.model,
        text=delta.text,
        reasoning=delta.reasoning,
        tool_calls=join_call_deltas(delta.tool_calls),
        token_ids=result.token_ids,
        finish=result.finish,
        logprobs=result.logprobs,
        prompt_token_ids=result.prompt_token_ids,
    )
