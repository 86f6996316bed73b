"""Messages and variables have the form that the model's chat template reads."""

from __future__ import annotations

import pytest
from outrider_router.requests.chat_prompt import template_messages, template_variables

from outrider.errors import InvalidRequestError
from outrider.spec.tools import Tool, ToolCall, ToolChoiceMode, ToolOptions
from outrider.text.template_traits import TemplateTraits
from outrider.wire.inference import ChatMessage, ChatPrompt

USUAL = TemplateTraits(renders_tools=True)
HARMONY = TemplateTraits(renders_tools=True, is_harmony=True)


def _history(arguments: str = '{"a": 1}', content: str = "") -> ChatPrompt:
    return ChatPrompt(
        (
            ChatMessage(role="user", content="x"),
            ChatMessage(
                role="assistant",
                content=content,
                reasoning="because",
                tool_calls=(ToolCall(call_id="c1", name="look", arguments=arguments),),
            ),
            ChatMessage(role="tool", content="seen", tool_call_id="c1"),
        )
    )


@pytest.mark.parametrize(
    ("traits", "arguments", "content"),
    [
        (USUAL, {"a": 1}, ""),
        (TemplateTraits(has_text_arguments=True), '{"a": 1}', ""),
        (TemplateTraits(has_null_content=True), {"a": 1}, None),
    ],
)
def test_calls_have_the_form_that_the_template_reads(
    traits: TemplateTraits, arguments: object, content: str | None
) -> None:
    message = template_messages(_history(), traits)[1]
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    ]
    assert message["content"] == content


def test_several_calls_are_refused_if_the_template_has_one_in_a_message() -> None:
    calls = tuple(ToolCall(call_id=name, name="look", arguments="{}") for name in ("a", "b"))
    prompt = ChatPrompt((ChatMessage(role="assistant", content="", tool_calls=calls),))
    assert len(template_messages(prompt, USUAL)[0]["tool_calls"]) == 2
    with pytest.raises(InvalidRequestError, match="one tool call in a message, got 2") as refused:
        template_messages(prompt, TemplateTraits(has_single_calls=True))
    assert refused.value.param == "messages[0].tool_calls"


def test_a_text_beside_calls_is_kept() -> None:
    traits = TemplateTraits(has_null_content=True)
    assert template_messages(_history(content="I look"), traits)[1]["content"] == "I look"


def test_ids_are_short_for_templates_that_demand_it() -> None:
    _, called, result = template_messages(_history(), TemplateTraits(has_short_ids=True))
    short = called["tool_calls"][0]["id"]
    assert len(short) == 9 and short.isalnum()
    assert result["tool_call_id"] == short
    assert template_messages(_history(), USUAL)[2]["tool_call_id"] == "c1"


@pytest.mark.parametrize("arguments", ["", "null", " null "])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    (call,) = template_messages(_history(arguments), USUAL)[1]["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "NaN", "[" * 10_000, '{"a": 1} x'])
def test_arguments_that_are_no_json_object_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        template_messages(_history(arguments), TemplateTraits(has_text_arguments=True))
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"
    assert refused.value.reason == "INVALID_REQUEST"


def test_reasoning_of_a_history_has_every_name_that_templates_read() -> None:
    message = template_messages(_history(), HARMONY)[1]
    assert message["reasoning"] == message["reasoning_content"] == message["thinking"] == "because"
    # Templates of gpt-oss refuse both.
    assert "thinking" not in template_messages(_history(content="I look"), HARMONY)[1]


@pytest.mark.parametrize(
    ("traits", "effort", "expected"),
    [(USUAL, "xhigh", "xhigh"), (HARMONY, "xhigh", "high"), (HARMONY, "none", "low")],
)
def test_efforts_are_those_that_the_model_knows(
    traits: TemplateTraits, effort: str, expected: str
) -> None:
    prompt = ChatPrompt((ChatMessage(role="user", content="x"),), reasoning_effort=effort)
    assert template_variables(prompt, traits)["reasoning_effort"] == expected


def test_tools_are_left_out_with_the_choice_none() -> None:
    tools = (Tool(name="look"),)
    for choice, expected in ((ToolChoiceMode.AUTO, True), (ToolChoiceMode.NONE, False)):
        prompt = ChatPrompt(
            (ChatMessage(role="user", content="x"),), tools=ToolOptions(tools=tools, choice=choice)
        )
        assert ("tools" in template_variables(prompt, USUAL)) is expected


def test_a_description_is_written_for_templates_that_need_one() -> None:
    prompt = ChatPrompt(
        (ChatMessage(role="user", content="x"),), tools=ToolOptions(tools=(Tool(name="look"),))
    )
    (usual,), (harmony,) = (template_variables(prompt, each)["tools"] for each in (USUAL, HARMONY))
    assert "description" not in usual["function"]
    assert harmony["function"]["description"] == ""


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_half_of_a_surrogate_pair_is_refused_by_the_field_that_has_it(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair") as refused:
        template_messages(_history(text), USUAL)
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"
    tools = ToolOptions(tools=(Tool(name="look", parameters=text),))
    for prompt, param in (
        (ChatPrompt((), tools=tools), "tools[0].function.parameters"),
        (ChatPrompt((), template_variables=text), "chat_template_kwargs"),
    ):
        with pytest.raises(InvalidRequestError, match="half of a surrogate pair") as refused:
            template_variables(prompt, USUAL)
        assert refused.value.param == param


def test_a_whole_surrogate_pair_is_a_character() -> None:
    (_, message, _) = template_messages(_history('{"a": "\\ud83d\\ude80"}'), USUAL)
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "\U0001f680"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "may be nested at most 64 levels deep"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "may be nested at most 64 levels deep"),
        ('{"a": -' + "9" * 4301 + "}", "an integer has more than 4300 digits"),
        ('{"a": NaN}', "must be a JSON object: NaN is no JSON"),
        ("[1]", "must be a JSON object, got '[1]'"),
    ],
    ids=["very deep", "deep", "long integer", "constant", "list"],
)
def test_arguments_that_cannot_be_read_are_refused_in_plain_words(arguments: str, why: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        template_messages(_history(arguments), USUAL)
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"
    assert refused.value.message.endswith(why)


def test_arguments_may_have_long_integers() -> None:
    number = int("-" + "9" * 4300)
    message = template_messages(_history(f'{{"a": {number}}}'), USUAL)[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": number}
