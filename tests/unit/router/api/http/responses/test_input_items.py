"""Input items become the messages that the same chat would have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from outrider_router.api.http.responses.input_items import (
    Conversation,
    Item,
    item_bytes,
    list_items,
)
from outrider_router.api.http.responses.request_models import CreateResponseRequest
from pydantic import ValidationError

from outrider.errors import InvalidRequestError, NotFoundError
from outrider.spec.tools import ToolCall
from outrider.wire.inference import ChatMessage
from tests.unit.router.api.http.responses.support import ITEM

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
    "encrypted_content": None,
}
STORED: Item = {"type": "function_call", "id": "fc_9", "call_id": "c9", "name": "g",
                "arguments": "{}", "status": "completed"}  # fmt: skip


def listed(inputs: object) -> tuple[Item, ...]:
    body = CreateResponseRequest.model_validate({"input": inputs})
    numbers = itertools.count()

    def find(item_id: str, where: str) -> Item:
        if item_id != "fc_9":
            raise NotFoundError("no", reason="ITEM_NOT_FOUND", param=where)
        return STORED

    items = list_items(body.input, lambda prefix: f"{prefix}{next(numbers)}", find)
    for item in items:
        ITEM.validate_python(item, strict=True)
    return items


def messages(inputs: object, instructions: str | None = None) -> tuple[ChatMessage, ...]:
    return Conversation(instructions, listed(inputs), num_stored=0).messages


def call(call_id: str = "c1", name: str = "f") -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments="{}")


def test_a_string_is_a_message_of_the_user() -> None:
    assert messages("hello") == (ChatMessage(role="user", content="hello"),)


def test_instructions_come_first() -> None:
    assert messages("a", "Be brief.")[0] == ChatMessage(role="system", content="Be brief.")
    assert len(messages("a", "")) == 1


@pytest.mark.parametrize("typed", [{}, {"type": "message"}])
@pytest.mark.parametrize(
    ("role", "template_role"),
    [("user", "user"), ("system", "system"), ("developer", "system"), ("assistant", "assistant")],
)
def test_a_message_has_a_string_or_parts(
    typed: dict[str, str], role: str, template_role: str
) -> None:
    expected = (ChatMessage(role=template_role, content="ab"),)
    for content in (
        "ab",
        [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}],
    ):
        assert messages([{**typed, "role": role, "content": content}]) == expected


def test_an_answer_with_calls_is_one_message() -> None:
    second = {**CALL, "call_id": "c2", "name": "g"}
    found = messages(
        [
            {"role": "user", "content": "2 + 2?"},
            THOUGHT,
            {"role": "assistant", "content": "I ask."},
            CALL,
            second,
            OUTPUT,
            {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
            THOUGHT,
            {"role": "assistant", "content": "4"},
        ]
    )
    assert found == (
        ChatMessage(role="user", content="2 + 2?"),
        ChatMessage(
            role="assistant",
            content="I ask.",
            reasoning="Hm.",
            tool_calls=(call(), call("c2", "g")),
        ),
        ChatMessage(role="tool", content="4", tool_call_id="c1", name="f"),
        ChatMessage(role="tool", content="5", tool_call_id="c2", name="g"),
        ChatMessage(role="assistant", content="4", reasoning="Hm."),
    )


def test_reasoning_after_calls_begins_another_message() -> None:
    found = messages([CALL, THOUGHT, {**CALL, "call_id": "c2"}, {"role": "user", "content": "a"}])
    assert [message.role for message in found] == ["assistant", "assistant", "user"]
    assert [len(message.tool_calls) for message in found] == [1, 1, 0]
    two = messages([{"role": "assistant", "content": text} for text in "ab"])
    assert [message.content for message in two] == ["a", "b"]


def test_a_reference_stands_for_a_stored_item() -> None:
    for typed in ({"type": "item_reference"}, {}):
        (message,) = messages([{**typed, "id": "fc_9"}])
        assert message.tool_calls == (call("c9", "g"),)
    with pytest.raises(NotFoundError) as raised:
        listed([{"role": "user", "content": "a"}, {"id": "x"}])
    assert raised.value.param == "input[1].id"


def test_ids_of_clients_are_used_and_others_are_made() -> None:
    items = listed([{**CALL, "id": "mine"}, OUTPUT, THOUGHT, {"role": "user", "content": "a"}])
    assert [item["id"] for item in items] == ["mine", "fco_0", "rs_1", "msg_2"]


def test_an_output_needs_an_earlier_call() -> None:
    for inputs in ([OUTPUT], [OUTPUT, CALL], [{**CALL, "call_id": "c2"}, OUTPUT]):
        with pytest.raises(InvalidRequestError) as raised:
            messages(inputs)
        assert raised.value.param.startswith("input[") and "no function_call" in str(raised.value)


def test_stored_arguments_that_were_cut_off_do_not_end_a_conversation() -> None:
    cut = {**STORED, "arguments": '{"city": "Os'}
    (stored,) = Conversation(None, [cut], num_stored=1).messages
    assert stored.tool_calls[0].arguments == "{}"
    (sent,) = Conversation(None, [cut], num_stored=0).messages
    assert sent.tool_calls[0].arguments == cut["arguments"]


def test_errors_of_messages_name_the_item() -> None:
    items = [STORED, *listed([{"role": "user", "content": "a"}, CALL, {**CALL, "call_id": "c2"}])]
    conversation = Conversation("b", items, num_stored=1)
    arguments = "tool_calls[1].function.arguments"
    for param, name in (
        ("messages[0].content", "instructions"),
        ("messages[1]", "previous_response_id"),
        ("messages[1].tool_calls[0].function.arguments", "previous_response_id"),
        ("messages[2]", "input[0]"),
        ("messages[3].tool_calls", "input[1]"),
        (f"messages[3].{arguments}", "input[2].arguments"),
        ("tools", None),
        ("prompt", None),
    ):
        assert conversation.field_name(param) == name, param


@pytest.mark.parametrize(
    "inputs",
    [
        5,
        None,
        [],
        [5],
        [[]],
        [{}],
        [{"role": "wizard", "content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"text": "a"}]}],
        [{"role": "user", "content": [{"type": 5, "text": "a"}]}],
        [{"type": "function_call", "call_id": "a", "name": "b"}],
        [{"type": "function_call_output", "call_id": "a"}],
        [{"type": "function_call_output", "call_id": "", "output": "a"}],
        [{"type": "reasoning", "content": "a"}],
        [{"type": ["message"], "role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}] * 4097,
    ],
)
def test_what_is_no_input_is_refused(inputs: object) -> None:
    with pytest.raises(ValidationError):
        listed(inputs)


def test_thousands_of_items_are_one_conversation() -> None:
    many = [{**CALL, "call_id": f"c{n}"} for n in range(1000)]
    outputs = [{**OUTPUT, "call_id": f"c{n}"} for n in range(1000)]
    turns = [item for pair in zip(many, outputs, strict=True) for item in pair]
    assert len(messages(turns)) == 2000
    assert len(messages(many)) == 1


@pytest.mark.parametrize("text", ["", "a" * 1000, "\u00e9" * 1000, "\U0001f600" * 1000])
def test_the_size_of_an_item_is_that_of_its_text(text: str) -> None:
    def size(content: Any) -> int:
        (item,) = listed([{"role": "user", "content": content}])
        return item_bytes(item)

    assert size(text) - size("") >= len(text.encode()) * (1 if text.isascii() else 1 / 2)
    assert size([{"type": "input_text", "text": text}] * 3) >= 3 * len(text)
