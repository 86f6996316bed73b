"""What a body means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from outrider_router.api.http.request_models import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
)
from outrider_router.api.http.request_translation import chat_requests, completion_requests
from outrider_router.api.http.unsupported_fields import (
    CHAT,
    COMPLETION,
    UnsupportedFieldError,
    UnsupportedFields,
)
from pydantic import ValidationError

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.tools import Tool, ToolCall, ToolChoiceMode, ToolOptions
from outrider.wire.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)

HELLO = [{"role": "user", "content": "hello"}]


def completion(prompt: object = "a", **fields: Any) -> tuple[GenerateRequest, ...]:
    body = CompletionRequest.model_validate({"prompt": prompt, **fields})
    return completion_requests(body, None)


def chat(messages: object = HELLO, **fields: Any) -> tuple[GenerateRequest, ...]:
    body = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    return chat_requests(body, None)


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("ab", [TextPrompt("ab")]),
        (["ab", "c"], [TextPrompt("ab"), TextPrompt("c")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
    ],
)
def test_a_prompt_is_a_text_texts_ids_or_lists_of_ids(prompt: object, meant: object) -> None:
    assert [request.prompt for request in completion(prompt)] == meant


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", 1], [1, "a"], [True], [1.5], [-1], None, 3])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ValidationError):
        completion(prompt)


def test_a_mistake_in_a_long_prompt_is_one_mistake() -> None:
    with pytest.raises(ValidationError) as raised:
        completion([1] + ["a"] * 10_000)
    assert raised.value.error_count() == 1


def test_what_is_left_open_is_as_openai_has_it() -> None:
    (request,) = completion()
    assert request.sampling == SamplingOptions(temperature=1.0)
    assert request.stopping == StoppingOptions(default_max_tokens=16)
    assert request.speculation == SpeculationOptions()
    assert (request.priority, request.resumable, request.top_logprobs) == (0, False, None)
    (request,) = chat()
    assert request.stopping == StoppingOptions(max_tokens=None)
    assert request.prompt == ChatPrompt((ChatMessage(role="user", content="hello"),))


def test_every_field_arrives() -> None:
    (request,) = completion(
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": -3, "6": 2.5},
        seed=11,
        stop="x",
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[4],
        ignore_eos=True,
        banned_token_ids=[8],
        allowed_token_ids=[1, 2],
        bad_words=["no", "never"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        return_token_ids=True,
        priority=3,
        rule="rejection",
        speculate=True,
        drafter="ngram",
        draft_tokens=6,
        draft_top_k=2,
        look_ahead=0,
        fan_out=3,
        logprobs=5,
    )
    assert request == GenerateRequest(
        prompt=TextPrompt("a"),
        model="m",
        sampling=SamplingOptions(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.5,
            logit_bias=((5, -3.0), (6, 2.5)),
            seed=11,
            rule=Rule.REJECTION,
            banned_token_ids=(8,),
            allowed_token_ids=(1, 2),
            bad_words=("no", "never"),
        ),
        stopping=StoppingOptions(
            max_tokens=9,
            min_tokens=2,
            stop=("x",),
            stop_token_ids=(4,),
            ignore_eos=True,
            include_stop_str_in_output=True,
        ),
        speculation=SpeculationOptions(
            enabled=True,
            method=DraftMethod.NGRAM,
            draft_tokens=6,
            draft_top_k=2,
            look_ahead=0,
            fan_out=3,
        ),
        priority=3,
        top_logprobs=5,
        skip_special_tokens=False,
        return_prompt_token_ids=True,
    )


def test_answers_of_a_prompt_stand_side_by_side_and_count_up_its_seed() -> None:
    requests = completion(["a", "b"], n=3, seed=2**64 - 2)
    assert [request.prompt for request in requests] == [TextPrompt("a")] * 3 + [TextPrompt("b")] * 3
    assert [request.sampling.seed for request in requests] == [2**64 - 2, 2**64 - 1, 0] * 2
    assert {request.sampling.seed for request in completion(n=3)} == {None}
    assert completion(seed=-1)[0].sampling.seed == 2**64 - 1


def test_a_chosen_id_names_every_choice() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "n": 2})
    named = completion_requests(body, RequestId("r"))
    assert [request.request_id for request in named] == ["r-0", "r-1"]
    single = CompletionRequest.model_validate({"prompt": "a"})
    assert completion_requests(single, RequestId("r"))[0].request_id == "r"


def test_more_choices_than_the_bound_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_CHOICES}"):
        completion(["a"] * 2, n=MAX_CHOICES)


def test_the_newer_bound_of_a_chat_is_the_stronger_one() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7)[0].stopping.max_tokens == 7
    assert chat(max_tokens=5)[0].stopping.max_tokens == 5


def test_parts_of_a_message_are_joined_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (request,) = chat([{"role": "developer", "content": parts}])
    assert request.prompt == ChatPrompt((ChatMessage(role="system", content="ab"),))
    with pytest.raises(ValidationError, match="'text'"):
        chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_logprobs_of_a_chat_need_to_be_asked_for() -> None:
    assert chat(logprobs=True)[0].top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=4)[0].top_logprobs == 4
    assert chat(logprobs=False, top_logprobs=0)[0].top_logprobs is None
    with pytest.raises(InvalidRequestError, match="needs logprobs"):
        chat(top_logprobs=4)


def test_every_field_that_would_change_an_answer_is_refused_by_its_name() -> None:
    kinds: list[tuple[Callable[..., object], UnsupportedFields]] = [
        (completion, COMPLETION),
        (chat, CHAT),
    ]
    for ask, fields in kinds:
        for name, harmless in fields.items():
            for value in (None, *harmless):
                ask(**{name: value})
            with pytest.raises(UnsupportedFieldError, match=f"^{name} is not sup") as raised:
                ask(**{name: {"something": "else"}})
            assert (raised.value.reason, raised.value.param) == ("UNSUPPORTED", name)


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (completion, {"add_special_tokens": False}),
        (completion, {"best_of": 2}),
        (completion, {"echo": True, "logprobs": 0}),
        (chat, {"echo": True}),
        (completion, {"prompt_logprobs": 0}),
        (chat, {"add_special_tokens": True}),
        (completion, {"tools": [{}]}),
        (completion, {"thinking_token_budget": 5}),
        (chat, {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
        (chat, {"structured_outputs": {"structural_tag": "{}"}}),
        (chat, {"messages": [{**HELLO[0], "refusal": "no"}]}),
    ],
)
def test_so_is_what_clients_send(ask: Callable[..., object], fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError):
        ask(**fields)


def test_fields_that_nobody_knows_are_ignored() -> None:
    assert completion(user="me", store=True, metadata={"a": "b"}, no_such_field=3) == completion()


def test_tools_and_their_calls_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    (request,) = chat(
        [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "1", "content": "r", "name": "f"},
        ],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        thinking_token_budget=7,
    )
    assert request.prompt == ChatPrompt(
        (
            ChatMessage(role="user", content="hello"),
            ChatMessage(
                role="assistant",
                tool_calls=(ToolCall(call_id="1", name="f", arguments='{"a": 1}'),),
                reasoning="hm",
            ),
            ChatMessage(role="tool", content="r", tool_call_id="1", name="f"),
        ),
        tools=ToolOptions(
            tools=(Tool(name="f", description="d", parameters='{"type": "object"}'),),
            choice=ToolChoiceMode.NAMED,
            named="f",
            parallel=False,
        ),
        template_variables='{"enable_thinking": false}',
        reasoning_effort="low",
        thinking_token_budget=7,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "0.5"},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"top_p": 0},
        {"n": 0},
        {"n": True},
        {"n": 2.5},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": 101}},
        {"stop": ""},
        {"stop": ["x"] * 65},
        {"max_tokens": 0},
        {"seed": 2**64},
        {"rule": "fair"},
        {"drafter": "magic"},
        {"priority": 101},
        {"logprobs": 21},
        {"stream": "yes"},
        {"stream_options": []},
    ],
)
def test_what_is_out_of_range_or_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        completion(**fields)
