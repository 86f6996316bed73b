"""Generation responses over HTTP: all choices of a request, as one body or as an event stream.

A streamed response begins with its first text. Errors before that set the HTTP status; later errors
are events of the stream. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Send

from outrider.ids import RequestId
from outrider.wire.inference import Delta, FinishInfo, GenerateRequest, PromptInfo, StreamEvent
from outrider_router.admission.access_control import AccessGrant
from outrider_router.admission.request_group import RequestGroup
from outrider_router.api.http.errors import describe_error
from outrider_router.api.http.event_streams import (
    ConnectedResponse,
    EventSender,
    send_events,
    send_json,
)
from outrider_router.api.http.response_writers import ChoiceState, ResponseWriter
from outrider_router.api.http.usage import usage_body
from outrider_router.base import tenants
from outrider_router.requests.service import RouterService

DONE_EVENT = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGeneration:
    """One HTTP generation request after translation: its router requests, writer and output
    options.
    """

    requests: Sequence[GenerateRequest]
    """Router requests, one for each choice."""
    writer: ResponseWriter
    request_id: RequestId
    """Id of the request in logs and in the response's headers."""
    caller: tenants.Caller
    traceparent: str = ""
    """W3C Trace Context that the client sent, or ""."""
    timeout_s: float | None = None
    """Time limit of the whole request in seconds; None is unlimited."""
    prompt_echoes: Sequence[str] = ()
    """Text that precedes each choice if the prompt is echoed; empty otherwise."""
    include_usage: bool = False
    continuous_usage: bool = False
    include_reasoning: bool = True
    """Whether the response has the reasoning of chats."""


def make_response(
    service: RouterService, asked: HttpGeneration, *, stream: bool
) -> ConnectedResponse:
    """Return the response to a generation request, as one body or as an event stream."""
    return ConnectedResponse(partial(_stream if stream else _whole, service, asked))


async def _serve_choices(
    service: RouterService,
    asked: HttpGeneration,
    write: Callable[[ChoiceState, StreamEvent], Awaitable[None]],
) -> list[ChoiceState]:
    """Serve all choices concurrently and return their final states. The first error of one choice
    cancels the others.
    """
    echoes = asked.prompt_echoes or [""] * len(asked.requests)
    choices = [ChoiceState(index=index, echo=echo) for index, echo in enumerate(echoes)]

    async def serve(choice: ChoiceState, passed: AccessGrant) -> None:
        async def take(event: StreamEvent) -> None:
            await write(choice, event)

        own_id = asked.request_id
        await service.serve_request(
            asked.requests[choice.index],
            take,
            timeout_s=asked.timeout_s,
            caller=asked.caller,
            traceparent=asked.traceparent,
            own_id=own_id if len(choices) == 1 else RequestId(f"{own_id}-{choice.index}"),
            passed=passed,
            group=group,
        )

    # Admitted together: otherwise some choices could use up the limits that the others need.
    group = RequestGroup(len(choices)) if len(choices) > 1 else None
    passes = service.access_control.enter_requests(asked.caller, asked.requests)
    try:
        await _all([partial(serve, *pair) for pair in zip(choices, passes, strict=True)])
    finally:
        for passed in passes:
            passed.release()
    return choices


async def _all(works: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run coroutines concurrently. The first error of one cancels the others."""
    if len(works) == 1:
        await works[0]()
        return
    tasks = [asyncio.create_task(work()) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(service: RouterService, asked: HttpGeneration, send: Send) -> None:
    async def collect(choice: ChoiceState, event: StreamEvent) -> None:
        match event:
            case Delta():
                choice.text.append(event.text)
                if asked.include_reasoning:
                    choice.reasoning.append(event.reasoning)
                choice.tool_calls += event.tool_calls
                choice.has_calls = bool(choice.tool_calls)
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
            case FinishInfo():
                choice.finish = event
            case PromptInfo():
                choice.prompt_ids = event.prompt_token_ids

    choices = await _serve_choices(service, asked, collect)
    await send_json(send, asked.writer.write_whole(choices))


class _Chunks:
    """Converts the messages of all choices into server-sent events."""

    def __init__(self, asked: HttpGeneration, write: Callable[[str], Awaitable[None]]) -> None:
        self._form, self._write = asked.writer, write
        self._continuous = asked.continuous_usage
        self._include_reasoning = asked.include_reasoning
        self._silent = asked.writer.is_text_only
        """Whether tokens that complete no text need no chunk."""
        self._prompt_tokens: dict[int, int] = {}

    async def __call__(self, choice: ChoiceState, event: StreamEvent) -> None:
        match event:
            case Delta():
                choice.tokens += len(event.token_ids)
                reasoning = event.reasoning if self._include_reasoning else ""
                choice.has_calls = choice.has_calls or bool(event.tool_calls)
                if event.text or reasoning or event.tool_calls or not self._silent:
                    chunk = self._form.write_delta(
                        choice,
                        event.text,
                        event.token_ids,
                        event.logprobs,
                        self._usage(choice),
                        reasoning=reasoning,
                        tool_calls=event.tool_calls,
                    )
                    await self._write(chunk)
            case FinishInfo():
                choice.finish = event
                choice.tokens = event.usage.completion_tokens
                await self._write(self._form.write_end(choice, self._usage(choice)))
            case PromptInfo():
                self._prompt_tokens[choice.index] = event.prompt_tokens
                choice.prompt_ids = event.prompt_token_ids

    def _usage(self, choice: ChoiceState) -> dict[str, object] | None:
        if not self._continuous:
            return None
        return usage_body(self._prompt_tokens.get(choice.index, 0), choice.tokens)


async def _stream(service: RouterService, asked: HttpGeneration, send: Send) -> None:
    async def serve(write: EventSender) -> str:
        choices = await _serve_choices(service, asked, _Chunks(asked, write))
        return (asked.writer.write_usage(choices) if asked.include_usage else "") + DONE_EVENT

    def fail(error: Exception) -> str:
        return f"data: {describe_error(error).body}\n\n{DONE_EVENT}"

    await send_events(service, send, serve, fail)
