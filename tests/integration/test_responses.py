"""OpenAI's Responses API on the real three processes, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from tests.integration.stack import Stack, StackOptions
from tests.waiting import wait_until

TOOL: Any = {
    "type": "function",
    "name": "paint",
    "description": "Paint the house.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
    "strict": True,
}
FREE = {"ignore_eos": True}


class Colour(BaseModel):
    """What the model is asked for."""

    colour: Literal["red", "blue"]


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--http", "127.0.0.1:0", "--model-name", "tiny"],
    }


@pytest.fixture(scope="module", autouse=True)
def _parser() -> Iterator[None]:
    """The tiny model's template has no format of calls, so an operator names one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_ROUTER_TOOL_CALL_PARSER", "hermes")
        yield


@pytest.fixture
def api(stack: Stack) -> Iterator[OpenAI]:
    url = f"http://{stack.router.ready['http']}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def called(response: Response) -> ResponseFunctionToolCall:
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    return call


def test_a_stream_is_the_whole_response(api: OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "input": "Name a colour.",
        "instructions": "Be brief.",
        "temperature": 0,
        "max_output_tokens": 24,
        "extra_body": FREE,
    }
    whole = api.responses.create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.usage is not None and whole.usage.output_tokens == 24
    text = ""
    with api.responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
    assert text == whole.output_text != ""
    plain = api.responses.create(**{**asked, "extra_body": {**FREE, "speculate": False}})
    assert plain.output_text == text
    chat = api.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Name a colour."},
        ],
        temperature=0,
        max_tokens=24,
        extra_body=FREE,
    )
    assert chat.choices[0].message.content == text


def test_a_conversation_continues_and_ends(api: OpenAI) -> None:
    first = api.responses.create(model="tiny", input="a", max_output_tokens=8, temperature=0)
    asked: Any = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}
    second = api.responses.create(input="b", previous_response_id=first.id, **asked)
    replayed = api.responses.create(
        input=[
            {"role": "user", "content": "a"},
            *[item.model_dump(exclude_none=True) for item in first.output],  # type: ignore[list-item]
            {"role": "user", "content": "b"},
        ],
        store=False,
        **asked,
    )
    assert second.output_text == replayed.output_text
    assert second.usage is not None and replayed.usage is not None
    assert second.usage.input_tokens == replayed.usage.input_tokens
    items = list(api.responses.input_items.list(second.id, order="asc"))
    assert len(items) == 2 + len(first.output)
    assert api.responses.retrieve(second.id).output_text == second.output_text
    api.responses.delete(first.id)
    for missing in (first.id, replayed.id):
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError) as raised:
            api.responses.create(model="tiny", input="c", previous_response_id=missing)
        assert raised.value.code == "previous_response_not_found"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}])
def test_a_function_is_called_and_answered(api: OpenAI, choice: Any) -> None:
    asked: Any = {
        "model": "tiny",
        "input": "Paint my house.",
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 200,
    }
    first = api.responses.create(**asked)
    assert first.status == "completed"
    call = called(first)
    assert call.name == "paint" and Colour.model_validate_json(call.arguments)
    with api.responses.stream(**asked) as stream:
        arguments = "".join(
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        )
        streamed = called(stream.get_final_response())
    assert arguments == streamed.arguments == call.arguments
    second = api.responses.create(
        model="tiny",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Done."}],
        previous_response_id=first.id,
        max_output_tokens=8,
    )
    assert second.previous_response_id == first.id and second.usage is not None


def test_a_parsed_response_has_the_wanted_type(api: OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "input": "Name a colour.",
        "max_output_tokens": 200,
        "temperature": 0,
    }
    parsed = api.responses.parse(text_format=Colour, **asked)
    assert parsed.output_parsed is not None
    with api.responses.stream(text_format=Colour, **asked) as stream:
        stream.until_done()
        streamed = stream.get_final_response().output_parsed
    assert streamed == parsed.output_parsed
    schema: Any = {"format": {"type": "json_object"}}
    free = api.responses.create(text=schema, **asked)
    if free.status == "completed":
        assert isinstance(json.loads(free.output_text), dict)


def test_a_response_in_the_background_is_retrieved_or_cancelled(api: OpenAI) -> None:
    begun = api.responses.create(
        model="tiny", input="a", background=True, max_output_tokens=8, extra_body=FREE
    )
    assert begun.status in ("queued", "in_progress") and begun.output == []

    def ended() -> bool:
        return api.responses.retrieve(begun.id).status not in ("queued", "in_progress")

    wait_until(ended, timeout_s=60.0)
    assert api.responses.retrieve(begun.id).output_text
    long = api.responses.create(
        model="tiny", input="a", background=True, max_output_tokens=400, extra_body=FREE
    )
    cancelled = api.responses.cancel(long.id)
    assert cancelled.status in ("cancelled", "incomplete")
    assert api.responses.cancel(long.id).status == cancelled.status
    with pytest.raises(openai.BadRequestError, match="background"):
        done = api.responses.create(model="tiny", input="a", max_output_tokens=2)
        api.responses.cancel(done.id)


def test_errors_are_the_classes_that_its_users_catch(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.responses.create(model="tiny", input="a", tools=[{"type": "web_search"}])
    assert refused.value.param == "tools[0]" and refused.value.code == "unsupported"
    with (
        pytest.raises(openai.BadRequestError) as long,
        api.responses.stream(model="tiny", input="a", max_output_tokens=10**5) as stream,
    ):
        stream.until_done()
    assert long.value.param == "max_output_tokens"
