"""Input items of responses: how they are listed, and the conversation that they make up. Pure.

An item is an object of JSON's types, in the format in which OpenAI's API lists items. Items are
never changed once they are made, because stored responses share them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider.spec.tools import ToolCall, with_object_arguments
from outrider.wire.inference import ChatMessage
from outrider_router.api.http.responses.request_models import (
    ITEM_TYPES,
    InputFunctionCall,
    InputFunctionOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    InputReference,
    InputTextPart,
    OutputTextPart,
    UnsupportedObject,
)
from outrider_router.api.http.unsupported_fields import (
    REASONING_ITEM,
    UnsupportedFieldError,
    refuse_unsupported,
)

Item = dict[str, Any]
ItemFinder = Callable[[str, str], Item]
"""Function that returns the stored item of an id. The second argument names the field with the id.
Raises NotFoundError if there is none."""
PREVIOUS: Final = "previous_response_id"
"""Field that stands for the items of earlier responses in errors."""
_MESSAGE_PATH: Final = re.compile(
    r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?(\.\w+)?)?"
)


def list_items(
    inputs: str | Sequence[InputItem],
    make_id: Callable[[str], str],
    find_item: ItemFinder,
) -> tuple[Item, ...]:
    """Return the input of a request as items with ids.

    `make_id` returns a new id that begins with a prefix. `find_item` resolves references. Raises
    UnsupportedFieldError for items and parts of other types, and the errors of `find_item`.
    """
    if isinstance(inputs, str):
        parts = [{"type": "input_text", "text": inputs}]
        return (_message("user", parts, make_id("msg_")),)
    return tuple(
        _list_item(item, f"input[{index}]", make_id, find_item) for index, item in enumerate(inputs)
    )


def _list_item(
    item: InputItem, where: str, make_id: Callable[[str], str], find_item: ItemFinder
) -> Item:
    match item:
        case InputMessage(role=role):
            type_ = "output_text" if role == "assistant" else "input_text"
            texts = _texts(item.content, f"{where}.content")
            parts = [_text_part(type_, text) for text in texts]
            return _message(role, parts, item.id or make_id("msg_"))
        case InputFunctionCall():
            return {
                "type": "function_call",
                "id": item.id or make_id("fc_"),
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
                "status": "completed",
            }
        case InputFunctionOutput():
            output: str | list[Item]
            if isinstance(item.output, str):
                output = item.output
            else:
                texts = _texts(item.output, f"{where}.output")
                output = [_text_part("input_text", text) for text in texts]
            return {
                "type": "function_call_output",
                "id": item.id or make_id("fco_"),
                "call_id": item.call_id,
                "output": output,
                "status": "completed",
            }
        case InputReasoning():
            refuse_unsupported(item.model_extra, REASONING_ITEM, f"{where}.")
            return {
                "type": "reasoning",
                "id": item.id or make_id("rs_"),
                "summary": [],
                "content": [_text_part("reasoning_text", part.text) for part in item.content or ()],
                "status": "completed",
            }
        case InputReference(id=item_id):
            return find_item(item_id, f"{where}.id")
        case UnsupportedObject(type=type_):
            raise UnsupportedFieldError(
                f"{where} has the type {type_[:64]!r}, which is not supported here; these are: "
                f"{', '.join(ITEM_TYPES)}",
                param=where,
            )


def _texts(
    content: str | Sequence[InputTextPart | OutputTextPart | UnsupportedObject], where: str
) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, UnsupportedObject):
            raise UnsupportedFieldError(
                f"{where}[{index}] has the type {part.type[:64]!r}, which is not supported here; "
                "parts must be text",
                param=f"{where}[{index}]",
            )
        texts.append(part.text)
    return texts


def _text_part(type_: str, text: str) -> Item:
    if type_ == "output_text":
        return {"type": type_, "text": text, "annotations": [], "logprobs": []}
    return {"type": type_, "text": text}


def _message(role: str, parts: list[Item], item_id: str) -> Item:
    return {
        "type": "message",
        "id": item_id,
        "role": role,
        "content": parts,
        "status": "completed",
    }


def item_bytes(item: Item) -> int:
    """Return the memory in bytes that an item takes."""
    size, values = 0, [item]
    while values:
        value: Any = values.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
    return size


@dataclass(slots=True, kw_only=True)
class _AssistantMessage:
    """A message of the assistant that consecutive items make up."""

    origin: str
    """Path of the field with the first item."""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_origins: list[str] = field(default_factory=list)
    """Path of the field with each call."""

    def accepts(self, type_: str) -> bool:
        """Return whether an item of this type is part of the message: templates render reasoning,
        content and calls in this order."""
        if type_ == "reasoning":
            return not self.content and not self.calls
        return type_ == "function_call" or not self.content

    def add_item(self, item: Item, origin: str) -> None:
        """Add an item that the message accepts."""
        if item["type"] == "reasoning":
            self.reasoning += _part_texts(item["content"])
        elif item["type"] == "function_call":
            call = ToolCall(call_id=item["call_id"], name=item["name"], arguments=item["arguments"])
            # A client cannot mend a call that is stored here.
            self.calls.append(with_object_arguments(call) if origin == PREVIOUS else call)
            self.call_origins.append(origin)
        else:
            self.content += _part_texts(item["content"])


class Conversation:
    """Messages that a chat template renders, and the items from which they come."""

    def __init__(self, instructions: str | None, items: Sequence[Item], *, num_stored: int) -> None:
        """Convert items to messages. The first `num_stored` items are those of earlier responses.

        Consecutive items of the assistant become one message. Raises InvalidRequestError for the
        output of a function that was not called before.
        """
        self._messages: list[ChatMessage] = []
        self._origins: list[tuple[str, list[str]]] = []
        """For each message the path of its field, and those of its calls."""
        self._open: _AssistantMessage | None = None
        self._names: dict[str, str] = {}
        """Names of the functions that were called, by the id of the call."""
        if instructions:
            self._add(ChatMessage(role="system", content=instructions), "instructions")
        for index, item in enumerate(items):
            origin = PREVIOUS if index < num_stored else f"input[{index - num_stored}]"
            self._add_item(item, origin)
        self._close()

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages, oldest first."""
        return tuple(self._messages)

    def field_name(self, param: str) -> str | None:
        """Return the field of the request from which a field of the messages comes, such as
        `messages[0].tool_calls[1].function.arguments`; None for other fields."""
        found = _MESSAGE_PATH.match(param)
        if found is None:
            return None
        origin, calls = self._origins[int(found[1])]
        if found[2] is None or int(found[2]) >= len(calls):
            return origin
        origin = calls[int(found[2])]
        return origin if origin == PREVIOUS else f"{origin}{found[3] or ''}"

    def _add_item(self, item: Item, origin: str) -> None:
        type_ = item["type"]
        if type_ == "function_call_output":
            self._add_output(item, origin)
        elif type_ == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            content = "".join(_part_texts(item["content"]))
            self._add(ChatMessage(role=role, content=content), origin)
        else:
            if self._open is None or not self._open.accepts(type_):
                self._close()
                self._open = _AssistantMessage(origin=origin)
            self._open.add_item(item, origin)
            if type_ == "function_call":
                self._names[item["call_id"]] = item["name"]

    def _add_output(self, item: Item, origin: str) -> None:
        call_id, output = item["call_id"], item["output"]
        name = self._names.get(call_id)
        if name is None:
            raise InvalidRequestError(
                f"{origin} is the output of the call {call_id[:64]!r}, but no function_call with "
                "this call_id is before it",
                reason="INVALID_TOOLS",
                param=origin,
            )
        content = output if isinstance(output, str) else "".join(_part_texts(output))
        message = ChatMessage(role="tool", content=content, tool_call_id=call_id, name=name)
        self._add(message, origin)

    def _add(self, message: ChatMessage, origin: str) -> None:
        self._close()
        self._messages.append(message)
        self._origins.append((origin, []))

    def _close(self) -> None:
        """Append the message of the assistant that is being put together, if there is one."""
        message, self._open = self._open, None
        if message is None:
            return
        self._messages.append(
            ChatMessage(
                role="assistant",
                content="".join(message.content),
                reasoning="".join(message.reasoning),
                tool_calls=tuple(message.calls),
            )
        )
        self._origins.append((message.origin, message.call_origins))


def _part_texts(parts: Sequence[Item]) -> list[str]:
    return [part["text"] for part in parts]
