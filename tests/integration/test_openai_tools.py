"""The `openai` client's own helpers for tools, parsed models and reasoning, on the real three
processes. The chat template decides how calls and reasoning are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import BaseModel, Field

from outrider.text.tokenizer import Tokenizer
from tests.integration.stack import Stack, StackOptions
from tests.integration.tool_requests import QUESTION, TOOLS, called, check_calls

NAMED = {"type": "function", "function": {"name": "get-time_2"}}
PLAIN: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 400}
"""A greedy request without tools. Random weights end no reasoning: only its own tests allow it."""
ASKED: dict[str, Any] = {**PLAIN, "tools": TOOLS, "reasoning_effort": "none"}
REQUIRED: dict[str, Any] = {**ASKED, "tool_choice": "required"}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"drafter": "eagle3", "draft_tokens": 4},
    "tree": {"drafter": "eagle3", "draft_tokens": 16, "draft_top_k": 3},
    "ngram": {"drafter": "ngram", "draft_tokens": 6},
    "none": {"speculate": False},
}


class Weather(BaseModel):
    """Weather at a place."""

    city: Annotated[str, Field(max_length=8)]
    unit: Literal["celsius", "fahrenheit"]


class Report(BaseModel):
    """What is parsed from an answer."""

    places: Annotated[list[Weather], Field(max_length=2)]
    is_sunny: bool


@pytest.fixture(scope="module")
def tiny_target(tool_target: Path) -> Path:
    """The target of this module's processes."""
    return tool_target


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {"router": ["--http", "127.0.0.1:0", "--model-name", "tiny"]}


@pytest.fixture
def api(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=_url(stack), api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture
async def async_api(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=_url(stack), api_key="none", max_retries=0) as client:
        yield client


def _url(stack: Stack) -> str:
    return f"http://{stack.router.ready['http']}/v1"


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    """Names and arguments of a message's calls, whose ids are distinct."""
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" for call in calls)
    return [(call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]


def created(api: OpenAI, **options: Any) -> ChatCompletion:
    found = api.chat.completions.create(**options)
    assert isinstance(found, ChatCompletion)
    return found


def prompt_tokens(api: OpenAI, **options: Any) -> int:
    usage = created(api, **{**options, "max_tokens": 1}).usage
    assert usage is not None
    return usage.prompt_tokens


def test_required_calls_have_arguments_that_fit(api: OpenAI) -> None:
    for seed in range(4):
        choice = created(api, **{**REQUIRED, "temperature": 1.0, "seed": seed}).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        check_calls(calls_of(choice.message))


def test_a_named_tool_is_called_once(api: OpenAI) -> None:
    message = created(api, **{**ASKED, "tool_choice": NAMED}).choices[0].message
    ((name, _),) = calls_of(message)
    assert name == "get-time_2"
    check_calls(calls_of(message))


@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls_come_only_where_they_are_allowed(api: OpenAI, parallel: bool) -> None:
    # A grammar ends an answer before its least length only if nothing may follow.
    asked = {**REQUIRED, "parallel_tool_calls": parallel, "max_tokens": 2000}
    choice = created(api, **asked, extra_body={"min_tokens": 150}).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = calls_of(choice.message)
    check_calls(calls)
    assert len(calls) > 1 if parallel else len(calls) == 1


def test_without_a_choice_the_tools_are_in_the_prompt_and_nothing_is_enforced(api: OpenAI) -> None:
    plain = {**PLAIN, "reasoning_effort": "none"}
    without = prompt_tokens(api, **plain)
    assert prompt_tokens(api, **{**ASKED, "tool_choice": "none"}) == without
    assert prompt_tokens(api, **ASKED) > without
    assert prompt_tokens(api, **ASKED) == prompt_tokens(api, **{**ASKED, "tool_choice": "auto"})
    for choice in ("auto", "none"):
        found = created(api, **{**ASKED, "tool_choice": choice, "max_tokens": 48}).choices[0]
        # Random weights write no call.
        assert found.message.tool_calls is None and found.message.content


def test_the_stream_helper_gives_the_whole_answer(api: OpenAI) -> None:
    whole = created(api, **REQUIRED)
    names, arguments = [], []
    with api.chat.completions.stream(**REQUIRED) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments.append(event.arguments_delta)
            elif event.type == "tool_calls.function.arguments.done":
                names.append((event.name, event.arguments))
        final = stream.get_final_completion()
    calls = calls_of(whole.choices[0].message)
    assert calls_of(final.choices[0].message) == calls == names
    assert "".join(arguments) == "".join(each for _, each in calls)
    assert final.choices[0].finish_reason == "tool_calls"


def test_parts_of_a_call_come_as_openai_sends_them(api: OpenAI) -> None:
    with api.chat.completions.create(**REQUIRED, stream=True) as chunks:
        choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    parts = [part for choice in choices for part in choice.delta.tool_calls or []]
    first = [index for index, part in enumerate(parts) if part.id]
    for index, part in enumerate(parts):
        assert part.function is not None
        is_first = index in first
        assert (part.type == "function") is is_first and bool(part.function.name) is is_first
    assert [parts[index].index for index in first] == list(range(len(first)))
    assert len(parts) > 2 * len(first), "arguments are streamed, not sent at once"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def test_arguments_are_parsed_into_models(api: OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    asked = {**REQUIRED, "tools": tools, "parallel_tool_calls": False}
    parsed = api.chat.completions.parse(**asked).choices[0].message
    assert parsed.tool_calls is not None
    weather = parsed.tool_calls[0].function.parsed_arguments
    assert isinstance(weather, Weather)
    with api.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls is not None
    assert final.tool_calls[0].function.parsed_arguments == weather


def test_content_is_parsed_into_a_model(api: OpenAI) -> None:
    asked = {**PLAIN, "reasoning_effort": "none", "response_format": Report}
    parsed = api.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Report) and len(parsed.places) <= 2
    with api.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    # With tools that need not be called, the form of the content is kept, too.
    tools = [openai.pydantic_function_tool(Weather)]
    beside = api.chat.completions.parse(**asked, tools=tools).choices[0].message
    assert isinstance(beside.parsed, Report) and not beside.tool_calls


async def test_the_async_client_gets_the_same(api: OpenAI, async_api: AsyncOpenAI) -> None:
    wanted = calls_of(created(api, **REQUIRED).choices[0].message)
    whole = await async_api.chat.completions.create(**REQUIRED)
    assert calls_of(whole.choices[0].message) == wanted
    async with async_api.chat.completions.stream(**REQUIRED) as stream:
        final = await stream.get_final_completion()
    assert calls_of(final.choices[0].message) == wanted
    tools = [openai.pydantic_function_tool(Weather)]
    parsed = await async_api.chat.completions.parse(**{**REQUIRED, "tools": tools})
    for call in parsed.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}])
def test_drafts_do_not_change_calls(api: OpenAI, sampling: dict[str, Any]) -> None:
    def answer(stream: bool, **extra: Any) -> tuple[list[tuple[str, str]], list[int]]:
        body = {**extra, "return_token_ids": True}
        if not stream:
            choice = created(api, **{**REQUIRED, **sampling}, extra_body=body).choices[0]
            return calls_of(choice.message), choice.model_extra["token_ids"]  # type: ignore[index]
        with api.chat.completions.stream(**{**REQUIRED, **sampling}, extra_body=body) as chunks:
            ids = [
                token_id
                for event in chunks
                if event.type == "chunk"
                for choice in event.chunk.choices
                for token_id in (choice.model_extra or {}).get("token_ids", [])
            ]
            return calls_of(chunks.get_final_completion().choices[0].message), ids

    wanted = answer(False, **DRAFTS["none"])
    check_calls(wanted[0])
    for name, drafts in DRAFTS.items():
        assert answer(False, **drafts) == wanted, name
        assert answer(True, **drafts) == wanted, name


def test_choices_of_one_request_have_calls_of_their_own(api: OpenAI) -> None:
    found = created(api, **{**REQUIRED, "temperature": 1.0, "seed": 3}, n=3)
    for choice in found.choices:
        check_calls(calls_of(choice.message))
    ids = [call.id for choice in found.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == len(ids)


def test_a_turn_is_call_result_and_answer(api: OpenAI) -> None:
    first = created(api, **REQUIRED).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 7})}
        for call in first.tool_calls or []
    ]
    # The client's own message object goes back as it came.
    turns = [*QUESTION, first, *results]
    without_result = prompt_tokens(api, **{**ASKED, "messages": turns[:-1]})
    assert prompt_tokens(api, **{**ASKED, "messages": turns}) > without_result
    last = {**ASKED, "messages": turns, "tool_choice": "none", "max_tokens": 40}
    assert created(api, **last).choices[0].message.content
    again = created(api, **{**REQUIRED, "messages": turns}).choices[0].message
    check_calls(calls_of(again))


def test_reasoning_of_a_history_is_rendered(api: OpenAI) -> None:
    def size(message: dict[str, Any]) -> int:
        turns = [*QUESTION, message, {"role": "tool", "tool_call_id": "call_1", "content": "7"}]
        return prompt_tokens(api, **{**ASKED, "messages": turns})

    message = called("get_weather", '{"city": "Oslo", "unit": "celsius"}')
    assert size({**message, "reasoning_content": "I look it up."}) > size(message)
    assert size({**message, "reasoning": "I look it up."}) > size(message)


def test_reasoning_comes_apart_from_the_content(api: OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = {**PLAIN, "max_tokens": 24}
    whole = created(api, **asked, extra_body=thinking)
    message = whole.choices[0].message
    reasoning = message.reasoning_content  # type: ignore[attr-defined]
    assert reasoning and not message.content and message.reasoning == reasoning  # type: ignore[attr-defined]
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens
    with api.chat.completions.create(**asked, stream=True, extra_body=thinking) as chunks:
        deltas = [chunk.choices[0].delta for chunk in chunks]
    told = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(told) == reasoning and not any(delta.content for delta in deltas)
    hidden = created(api, **asked, extra_body={**thinking, "include_reasoning": False})
    assert "reasoning_content" not in (hidden.choices[0].message.model_extra or {})
    off = created(api, **asked, reasoning_effort="none").choices[0].message
    assert off.content and "reasoning_content" not in (off.model_extra or {})


@pytest.mark.parametrize("count", [0, 6])
@pytest.mark.parametrize("plan", DRAFTS)
def test_a_thinking_budget_ends_the_reasoning(
    api: OpenAI, tool_target: Path, plan: str, count: int
) -> None:
    """The model would think up to the end, and its tokenizer writes the tags in several tokens."""
    thinking: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = {**PLAIN, "max_tokens": 48}
    limited = {**thinking, **DRAFTS[plan], "thinking_token_budget": count}
    whole = created(api, **asked, extra_body=limited)
    message = whole.choices[0].message
    reasoning = (message.model_extra or {}).get("reasoning_content") or ""
    assert message.content and bool(reasoning) == bool(count)
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    tag = Tokenizer.load(tool_target).encode("</think>", add_special_tokens=False)
    assert whole.usage.completion_tokens_details.reasoning_tokens == count + len(tag) > count + 1
    with api.chat.completions.create(**asked, stream=True, extra_body=limited) as chunks:
        deltas = [chunk.choices[0].delta for chunk in chunks]
    told = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(told) == reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content
    undrafted = {**thinking, **DRAFTS["none"], "thinking_token_budget": count}
    assert created(api, **asked, extra_body=undrafted).choices[0].message == message
    # A budget that is not used up changes nothing.
    free = created(api, **asked, extra_body=thinking).choices[0].message
    unused = {**thinking, **DRAFTS[plan], "thinking_token_budget": 1000}
    assert created(api, **asked, extra_body=unused).choices[0].message == free
    assert not free.content


def test_enforced_answers_follow_a_thinking_budget(api: OpenAI) -> None:
    limited = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 9}
    parsed = api.chat.completions.parse(**PLAIN, response_format=Report, extra_body=limited)
    message = parsed.choices[0].message
    assert message.parsed is not None
    assert (message.model_extra or {}).get("reasoning_content")
    required = {**PLAIN, "tools": TOOLS, "tool_choice": "required", "extra_body": limited}
    called_with = created(api, **required).choices[0].message
    check_calls(calls_of(called_with))
    assert (called_with.model_extra or {}).get("reasoning_content")


@pytest.mark.parametrize("count", [-1, 2**40, 1.5, "7", True, [3]])
def test_thinking_budgets_that_are_no_counts_are_refused(api: OpenAI, count: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        created(api, **PLAIN, extra_body={"thinking_token_budget": count})
    assert refused.value.param == "thinking_token_budget"


def test_effort_and_variables_of_the_template_reach_the_prompt(api: OpenAI) -> None:
    plain = prompt_tokens(api, **PLAIN)
    assert prompt_tokens(api, **PLAIN, reasoning_effort="high") > plain
    names = {"chat_template_kwargs": {"names_only": True}}
    assert prompt_tokens(api, **ASKED, extra_body=names) < prompt_tokens(api, **ASKED)


def test_usage_comes_at_the_end_and_with_every_chunk(api: OpenAI) -> None:
    whole = created(api, **REQUIRED).usage
    assert whole is not None
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with api.chat.completions.create(**REQUIRED, stream=True, stream_options=options) as stream:
        *chunks, last = stream
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.prompt_tokens,
        whole.completion_tokens,
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts) and counts[-1] == whole.completion_tokens


def test_mistakes_are_the_clients_own_errors(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        created(api, **{**REQUIRED, "tools": [{"type": "function", "function": {"name": "a b"}}]})
    assert refused.value.param == "tools[0].function.name"
    with pytest.raises(openai.LengthFinishReasonError):
        api.chat.completions.parse(
            **{**PLAIN, "reasoning_effort": "none", "max_tokens": 3}, response_format=Report
        )
