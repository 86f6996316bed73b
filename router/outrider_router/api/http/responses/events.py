"""Output items of a response, and the typed events of its stream. Pure.

`ResponseOutput` turns the messages of one answer into both, so that a whole response and the items
of its stream are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.spec.tools import ToolCallDelta
from outrider.wire.inference import Delta, FinishInfo
from outrider.wire.messages import FinishReason
from outrider_router.api.http.errors import INVALID, HttpError
from outrider_router.api.http.response_writers import json_quote
from outrider_router.api.http.responses.input_items import Item
from outrider_router.api.http.usage import metrics_body, response_usage_body

Event = dict[str, Any]
"""An event of a stream, as OpenAI's API defines it: a JSON object with `type` and
`sequence_number`."""
RESPONSE_PREFIX: Final = "resp_"
_RATE_LIMIT: Final = 429


def write_events(events: Sequence[Event]) -> str:
    """Return events as server-sent events."""
    return "".join(f"event: {event['type']}\ndata: {json_quote(event)}\n\n" for event in events)


def error_body(error: HttpError) -> dict[str, object]:
    """Return the `error` of a failed response. OpenAI's API has few codes for it, so the message
    says the rest."""
    code = "server_error"
    if error.status == _RATE_LIMIT:
        code = "rate_limit_exceeded"
    elif error.type == INVALID:
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextKind:
    """Kind of an output item whose only part is text."""

    type: str
    prefix: str
    """First characters of the ids of items."""
    members: Mapping[str, object]
    """Further members of the item."""
    part: Mapping[str, object]
    """Members of the part other than its text."""
    event: str
    """First characters of the types of events with text."""
    event_members: Mapping[str, object]
    """Further members of these events."""


_MESSAGE: Final = _TextKind(
    type="message",
    prefix="msg_",
    members={"role": "assistant"},
    part={"type": "output_text", "annotations": [], "logprobs": []},
    event="response.output_text",
    event_members={"logprobs": []},
)
_REASONING: Final = _TextKind(
    type="reasoning",
    prefix="rs_",
    members={"summary": []},
    part={"type": "reasoning_text"},
    event="response.reasoning_text",
    event_members={},
)


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """The output item that the answer adds to now."""

    item_id: str
    kind: _TextKind | None
    """Kind of an item with text; None for a function call."""
    call: ToolCallDelta | None = None
    """First part of a function call; None for an item with text."""
    texts: list[str] = field(default_factory=list)
    """Parts of the text, or of the arguments of a function call."""

    def part(self, text: str) -> dict[str, object]:
        """Return the content part of an item with text."""
        assert self.kind is not None, "a function call has no parts"
        return {**self.kind.part, "text": text}

    def body(self, status: str, *, is_new: bool = False) -> Item:
        """Return the item, without content if `is_new`."""
        text = "" if is_new else "".join(self.texts)
        if self.call is not None:
            return {
                "type": "function_call",
                "id": self.item_id,
                "call_id": self.call.call_id,
                "name": self.call.name,
                "arguments": text,
                "status": status,
            }
        assert self.kind is not None, "an item is a call or has text"
        return {
            "type": self.kind.type,
            "id": self.item_id,
            **self.kind.members,
            "content": [] if is_new else [self.part(text)],
            "status": status,
        }


class ResponseOutput:
    """Output of one response while it is made.

    Its methods return the new events of the stream, in order. The first ones are `response.created`
    and `response.in_progress`, together with the first output.
    """

    def __init__(self, members: Mapping[str, object]) -> None:
        """Create the output of a response. `members` are the members of the response that do not
        change, with its `id`."""
        self._members = members
        self._stem = str(members["id"]).removeprefix(RESPONSE_PREFIX)
        self._items: list[Item] = []
        self._open: _OpenItem | None = None
        self._call_index = -1
        """Index of the newest function call among the calls of the answer."""
        self._number = 0
        """Number of events so far."""
        self._result: dict[str, object] = {"status": "queued"}
        """Members of the response that change, other than its items."""

    @property
    def status(self) -> str:
        """Status of the response: queued, in_progress, completed, incomplete, failed or
        cancelled."""
        return str(self._result["status"])

    @property
    def has_ended(self) -> bool:
        """Whether the response does not change any more."""
        return self.status not in ("queued", "in_progress")

    @property
    def items(self) -> tuple[Item, ...]:
        """The output items that are complete."""
        return tuple(self._items)

    @property
    def response(self) -> dict[str, object]:
        """The response as OpenAI's API defines it."""
        return {
            **self._members,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "output": list(self._items),
            **self._result,
        }

    def start(self) -> None:
        """Record that the answer is being made."""
        self._result = {"status": "in_progress"}

    def push_delta(self, delta: Delta) -> list[Event]:
        """Add new text, reasoning and parts of function calls. Return the new events."""
        events: list[Event] = []
        if delta.reasoning:
            self._add_text(events, _REASONING, delta.reasoning)
        if delta.text:
            self._add_text(events, _MESSAGE, delta.text)
        for call in delta.tool_calls:
            self._add_call(events, call)
        return events

    def finish(self, finish: FinishInfo, *, completed_at: int) -> list[Event]:
        """Complete the response. `completed_at` is the time in seconds since 1970. Return the last
        events of the stream."""
        events: list[Event] = []
        is_cut = finish.reason is FinishReason.LENGTH
        self._close_item(events, "incomplete" if is_cut else "completed")
        self._begin(events)
        self._result = {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else completed_at,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": response_usage_body(finish.usage),
            "metrics": metrics_body(finish.stats),
        }
        self._add_event(events, f"response.{self.status}", response=self.response)
        return events

    def fail(self, error: HttpError) -> list[Event]:
        """End the response with an error. Return the last events of the stream."""
        self._drop_item()
        events: list[Event] = []
        self._begin(events)
        self._result = {"status": "failed", "error": error_body(error)}
        self._add_event(events, "error", code=error.code, message=error.message, param=error.param)
        self._add_event(events, "response.failed", response=self.response)
        return events

    def cancel(self) -> None:
        """End the response because it was cancelled."""
        self._drop_item()
        self._result = {"status": "cancelled"}

    def _drop_item(self) -> None:
        """Complete the items without events, because the answer has been interrupted."""
        if self._open is not None:
            self._items.append(self._open.body("incomplete"))
            self._open = None

    def _add_text(self, events: list[Event], kind: _TextKind, text: str) -> None:
        if self._open is None or self._open.kind is not kind:
            self._open_item(events, kind.prefix, kind=kind)
        self._add_delta(events, f"{kind.event}.delta", text, content_index=0, **kind.event_members)

    def _add_call(self, events: list[Event], call: ToolCallDelta) -> None:
        if call.index != self._call_index:
            self._call_index = call.index
            self._open_item(events, "fc_", call=call)
        if call.arguments:
            self._add_delta(events, "response.function_call_arguments.delta", call.arguments)

    def _open_item(
        self,
        events: list[Event],
        prefix: str,
        *,
        kind: _TextKind | None = None,
        call: ToolCallDelta | None = None,
    ) -> None:
        self._close_item(events, "completed")
        self._begin(events)
        item_id = f"{prefix}{self._stem}{len(self._items):02x}"
        opened = self._open = _OpenItem(item_id=item_id, kind=kind, call=call)
        self._add_event(
            events,
            "response.output_item.added",
            output_index=len(self._items),
            item=opened.body("in_progress", is_new=True),
        )
        if kind is not None:
            part = opened.part("")
            self._add_item_event(events, "response.content_part.added", content_index=0, part=part)

    def _add_delta(self, events: list[Event], type_: str, text: str, **members: object) -> None:
        assert self._open is not None, "it was opened before"
        self._open.texts.append(text)
        self._add_item_event(events, type_, **members, delta=text)

    def _close_item(self, events: list[Event], status: str) -> None:
        opened = self._open
        if opened is None:
            return
        text = "".join(opened.texts)
        if opened.kind is None:
            self._add_item_event(events, "response.function_call_arguments.done", arguments=text)
        else:
            self._add_item_event(
                events,
                f"{opened.kind.event}.done",
                content_index=0,
                text=text,
                **opened.kind.event_members,
            )
            self._add_item_event(
                events, "response.content_part.done", content_index=0, part=opened.part(text)
            )
        item = opened.body(status)
        self._add_event(
            events, "response.output_item.done", output_index=len(self._items), item=item
        )
        self._items.append(item)
        self._open = None

    def _add_item_event(self, events: list[Event], type_: str, **members: object) -> None:
        """Add an event that belongs to the open item."""
        assert self._open is not None, "it was opened before"
        self._add_event(
            events,
            type_,
            item_id=self._open.item_id,
            output_index=len(self._items),
            **members,
        )

    def _begin(self, events: list[Event]) -> None:
        """Add the first events of the stream unless there are some already."""
        if self._number == 0:
            self.start()
            for type_ in ("response.created", "response.in_progress"):
                self._add_event(events, type_, response=self.response)

    def _add_event(self, events: list[Event], type_: str, **members: object) -> None:
        events.append({"type": type_, "sequence_number": self._number, **members})
        self._number += 1
