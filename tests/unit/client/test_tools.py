"""Tools from functions and from JSON, tool choices, and messages with calls and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest

from outrider.client import (
    ChatMessage,
    FinishInfo,
    FinishReason,
    GenerateResult,
    InvalidRequestError,
    SpecStats,
    Tool,
    ToolCall,
    Usage,
    assistant,
    function_tool,
    tool_result,
    user,
)
from outrider.client.options import GenerateOptions, make_prompt, make_request
from outrider.ids import RequestId
from outrider.spec.tools import MAX_TOOLS, ToolChoiceMode, ToolOptions
from outrider.wire.inference import ChatPrompt
from outrider.wire.inference_codec import request_from_pb, request_to_pb

CHAT = [user("Hi")]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
PLAIN = Tool(name="now")


def get_weather(
    city: Annotated[str, "Name of the city."],
    unit: Literal["celsius", "fahrenheit"] = "celsius",
    days: int | None = None,
    *,
    tags: list[str] = [],  # noqa: B006
    limits: dict[str, float] = {},  # noqa: B006
) -> str:
    """Return the weather of a city.

    Temperatures are whole degrees.
    """
    return f"{city} {unit} {days} {tags} {limits}"


def answer(text: str = "", *, reasoning: str = "", calls: tuple[ToolCall, ...] = ()) -> Any:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return GenerateResult(
        request_id=RequestId("r"),
        model="m",
        text=text,
        token_ids=(),
        finish=FinishInfo(reason=FinishReason.STOP_TOKEN, usage=usage, stats=SpecStats()),
        reasoning=reasoning,
        tool_calls=calls,
    )


def tools_of(options: GenerateOptions, prompt: Any = CHAT) -> ToolOptions:
    """The tools as the server gets them."""
    request = request_from_pb(request_to_pb(make_request(prompt, options)))
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.tools


def test_a_tool_has_the_signature_and_the_docstring_of_its_function() -> None:
    tool = function_tool(get_weather)
    assert tool.name == "get_weather"
    assert tool.description == ("Return the weather of a city.\n\nTemperatures are whole degrees.")
    assert json.loads(tool.parameters) == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "limits": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_methods_and_coroutines_are_tools_too() -> None:
    class Clock:
        async def now(self, exact: bool) -> str:
            return str(exact)

    schema = json.loads(function_tool(Clock().now).parameters)
    assert schema["properties"] == {"exact": {"type": "boolean"}}


def untyped(city) -> None: ...  # type: ignore[no-untyped-def]
def other(when: complex) -> None: ...
def keys(table: dict[int, str]) -> None: ...
def nested(items: list[set[int]]) -> None: ...
def many(*cities: str) -> None: ...
def first(city: str, /) -> None: ...
def unknown(city: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "^parameter city of untyped needs a type$"),
        (other, "^parameter when of other must have a type of str, .* got <class 'complex'>$"),
        (keys, "^parameter table of keys must have a type of"),
        (nested, "^parameter items of nested must have a type of"),
        (many, "^parameter cities of many cannot be passed by name$"),
        (first, "^parameter city of first cannot be passed by name$"),
        (unknown, "^the signature of unknown cannot be read: name 'Missing'"),
        (dict, "^a tool must be a function, got <class 'dict'>$"),
        ("f", "^a tool must be a function, got 'f'$"),
    ],
)
def test_a_signature_that_has_no_schema_is_refused(
    function: Callable[..., object], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as raised:
        function_tool(function)
    assert raised.value.reason == "INVALID_TOOLS"


def test_tools_are_given_as_tools_or_in_openais_form() -> None:
    tools = tools_of({"tools": [PLAIN, WEATHER]})
    assert tools.choice is ToolChoiceMode.AUTO and tools.parallel
    assert tools.tools[0] == PLAIN
    weather = tools.tools[1]
    assert (weather.name, weather.description) == ("get_weather", "Return the weather.")
    assert (json.loads(weather.parameters), weather.strict) == (
        WEATHER["function"]["parameters"],  # type: ignore[index]
        True,
    )


@pytest.mark.parametrize(
    ("choice", "mode", "named"),
    [
        ("auto", ToolChoiceMode.AUTO, ""),
        ("none", ToolChoiceMode.NONE, ""),
        ("required", ToolChoiceMode.REQUIRED, ""),
        ("get_weather", ToolChoiceMode.NAMED, "get_weather"),
    ],
)
def test_a_choice_is_a_mode_or_the_name_of_a_tool(
    choice: str, mode: ToolChoiceMode, named: str
) -> None:
    tools = tools_of({"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False})
    assert (tools.choice, tools.named, tools.parallel) == (mode, named, False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": 5}, "^tools must be a sequence of tools, got 5$"),
        ({"tools": WEATHER}, "^tools must be a sequence of tools"),
        ({"tools": [5]}, r"^tools\[0\] must be a Tool or .* got 5$"),
        ({"tools": [PLAIN, get_weather]}, r"^tools\[1\] must be .* function_tool makes a tool"),
        ({"tools": [{"type": "web_search"}]}, r"^tools\[0\] must be a Tool or"),
        ({"tools": [{"name": "a"}]}, r"^tools\[0\] must be a Tool or"),
        (
            {"tools": [{"type": "function", "function": {"name": 5}}]},
            r"^tools\[0\].function.name must be a text, got 5$",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 5}}]},
            r"^tools\[0\].function.description must be a text",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
            r"^tools\[0\].function.parameters must be a JSON schema, got 'x'$",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"a": set()}}}
                ]
            },
            r"^tools\[0\].function.parameters must be a JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]},
            r"^tools\[0\].function.strict must be true or false",
        ),
        ({"tools": [PLAIN] * (MAX_TOOLS + 1)}, f"^at most {MAX_TOOLS} tools are allowed$"),
        (
            {"tools": [PLAIN], "tool_choice": "later"},
            "^tool_choice must be auto, none, required or",
        ),
        ({"tool_choice": "now"}, "^tool_choice must be .* the name of a tool, got 'now'$"),
        ({"tool_choice": {"type": "function"}}, "^tool_choice must be"),
        ({"parallel_tool_calls": 1}, "^parallel_tool_calls must be true or false, got 1$"),
        ({"chat_template_kwargs": [1]}, "^chat_template_kwargs must be a mapping of JSON's values"),
        ({"chat_template_kwargs": {"a": object}}, "^chat_template_kwargs must be"),
    ],
)
def test_an_option_of_chats_says_what_is_allowed(options: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        make_request(CHAT, options)


@pytest.mark.parametrize(
    "name", ["tools", "tool_choice", "reasoning_effort", "thinking_token_budget"]
)
@pytest.mark.parametrize("prompt", ["text", [1, 2]])
def test_options_of_chats_need_a_conversation(prompt: Any, name: str) -> None:
    options: Any = {name: [] if name == "tools" else "none"}
    with pytest.raises(InvalidRequestError, match=f"^{name} needs a conversation as the prompt$"):
        make_request(prompt, options)


def test_a_chat_prompt_keeps_its_tools_and_settings() -> None:
    chat = ChatPrompt(
        (user("Hi"),),
        tools=ToolOptions(tools=(PLAIN,), choice=ToolChoiceMode.REQUIRED),
        template_variables='{"a": 1}',
        reasoning_effort="low",
    )
    assert make_prompt(chat) == chat
    assert make_request(chat, {}).prompt == chat
    assert tools_of({"parallel_tool_calls": False}, chat) == replace(chat.tools, parallel=False)
    changed = make_request(chat, {"reasoning_effort": "none", "chat_template_kwargs": {"b": [2]}})
    assert changed.prompt == replace(chat, reasoning_effort="none", template_variables='{"b": [2]}')
    limited = make_request(chat, {"thinking_token_budget": 0})
    assert limited.prompt == replace(chat, thinking_token_budget=0)


def test_an_answer_and_the_results_of_its_calls_continue_a_conversation() -> None:
    call = ToolCall(call_id="c1", name="get_weather", arguments='{"city": "Oslo"}')
    said = assistant(answer("Wait.", reasoning="Hm.", calls=(call,)))
    assert said == ChatMessage(
        role="assistant", content="Wait.", reasoning="Hm.", tool_calls=(call,)
    )
    assert tool_result(call, "rain") == ChatMessage(
        role="tool", content="rain", tool_call_id="c1", name="get_weather"
    )
    assert assistant("Hi") == ChatMessage(role="assistant", content="Hi")


@pytest.mark.parametrize("arguments", ["", '{"city": "Os', "[1]", "5", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_the_server_refuses_in_a_conversation_are_emptied(arguments: str) -> None:
    call = ToolCall(call_id="c1", name="f", arguments=arguments)
    said = assistant(answer(calls=(call, replace(call, arguments="{}"))))
    assert [each.arguments for each in said.tool_calls] == ["{}", "{}"]
