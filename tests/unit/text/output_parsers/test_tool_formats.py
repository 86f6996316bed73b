"""Tool calls in each format, whole and cut anywhere; what is no call is content."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.text.output_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    ToolCallStart,
    merge_events,
)
from outrider.text.output_parsers.formats import (
    TOOL_FORMATS,
    OutputFormat,
    choose_output_format,
    is_reasoning_open,
)

BAR, LOW = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


PARIS = '{"city": "Paris", "days": 2}'
TIME = '{"zone": "UTC \\"x\\" </tool_call> é"}'
TWO_CALLS = [
    ToolCallStart(0, "get_weather"),
    ArgumentsDelta(0, PARIS),
    ToolCallStart(1, "get_time"),
    ArgumentsDelta(1, TIME),
]
# Each as the format's publisher shows it: Hermes function calling (NousResearch), Qwen's guide on
# function calling, Llama's prompt formats, Mistral's tokenizer guide, DeepSeek's model cards, and
# OpenAI's guide of the harmony format.
ANSWERS: dict[str, str] = {
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_time", "arguments": {TIME}}}\n</tool_call>'
    ),
    "llama3_json": (
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
        f'{{"name": "get_time", "parameters": {TIME}}}'
    ),
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_time", "arguments": {TIME}}}]'
    ),
    "deepseek_v3": (
        f"{deepseek('tool calls begin')}"
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}get_weather\n"
        f"```json\n{PARIS}\n```{deepseek('tool call end')}\n"
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}get_time\n"
        f"```json\n{TIME}\n```{deepseek('tool call end')}{deepseek('tool calls end')}"
    ),
    "deepseek_v31": (
        f"{deepseek('tool calls begin')}"
        f"{deepseek('tool call begin')}get_weather{deepseek('tool sep')}{PARIS}"
        f"{deepseek('tool call end')}"
        f"{deepseek('tool call begin')}get_time{deepseek('tool sep')}{TIME}"
        f"{deepseek('tool call end')}{deepseek('tool calls end')}"
    ),
    "openai": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
        f"<|call|><|start|>assistant to=functions.get_time<|channel|>commentary<|message|>{TIME}"
        f"<|call|>"
    ),
    "pythonic": '[get_weather(city="Paris", days=2), get_time(zone=\'UTC "x" </tool_call> é\')]',
}
MISTRAL_11 = f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time{TIME}"


def parse(parser: OutputParser, *pieces: str) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push_text(piece)
    return merge_events(events + parser.flush())


def cut(text: str, seed: int) -> list[str]:
    """The text in random pieces."""
    rng = random.Random(seed)
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 60))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def check_cuts(name: str, text: str) -> list[OutputEvent]:
    """Parse the text in many ways, and return the events, which are the same in all."""
    whole = parse(TOOL_FORMATS[name].make(), text)
    assert parse(TOOL_FORMATS[name].make(), *text) == whole
    for seed in range(40):
        assert parse(TOOL_FORMATS[name].make(), *cut(text, seed)) == whole, cut(text, seed)
    return whole


def test_every_format_has_an_example() -> None:
    assert set(ANSWERS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", ANSWERS)
def test_two_calls_are_read_however_they_are_cut(name: str) -> None:
    assert check_cuts(name, ANSWERS[name]) == TWO_CALLS


def test_newer_mistral_models_write_names_before_arguments() -> None:
    assert check_cuts("mistral", MISTRAL_11) == TWO_CALLS


@pytest.mark.parametrize("name", sorted(set(ANSWERS) - {"llama3_json", "pythonic", "openai"}))
def test_text_before_calls_is_content(name: str) -> None:
    events = check_cuts(name, f"I look it up.\n\n{ANSWERS[name]}\n")
    assert events == [ContentDelta("I look it up."), *TWO_CALLS]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    "text",
    [
        "Hello.\n",
        "",
        " \n",
        "a < b, [1] and {x}",
        "[1] is a source",
        '{"answer": 42}',
        "[]",
        "{",
        "[",
        "<tool",
        "[TOOL_",
        '{"name": "not a call"',
    ],
)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    if name == "llama3_json" and text.endswith('"not a call"'):
        pytest.skip("a name is the beginning of a call")
    assert check_cuts(name, text) == ([ContentDelta(text)] if text else [])


MALFORMED = {
    "hermes": [
        "<tool_call>hello</tool_call>",
        '<tool_call>{"name": 5}</tool_call> more',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": ""}',
        "<tool_call>",
        '<tool_call>{"name": "' + "x" * 300 + '"}',
        '<tool_call>{"name": "a\\ud8zz"}',
    ],
    "mistral": ["[TOOL_CALLS]two words{}", "[TOOL_CALLS]", "[TOOL_CALLS]" + "x" * 300],
    "llama3_json": [
        "<|python_tag|>print(1)",
        '{"name": 5}',
        '{"name" "x"}',
        '{"type": "function"} and text',
    ],
    "pythonic": ["[f(1)]", "[f(a=1]", "[f(a=g())]", "[f(a=1) and]", "[f(**{})]", "[f(a=1, a=2)]"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(n, t) for n, texts in MALFORMED.items() for t in texts]
)
def test_a_call_without_a_name_is_content(name: str, text: str) -> None:
    events = check_cuts(name, text)
    if text == "[f(a=1) and]":
        assert events[0] == ToolCallStart(0, "f")
    else:
        assert events == [ContentDelta(text)]


def test_a_call_after_a_malformed_one_is_read() -> None:
    text = f"<tool_call>hm {ANSWERS['hermes']}"
    assert check_cuts("hermes", text) == [ContentDelta("<tool_call>hm"), *TWO_CALLS]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ["{}"]),
        (', "arguments": "{\\"a\\": 1}"', ['{"a": 1}']),
        (', "arguments": null', ["null"]),
    ],
)
def test_arguments_are_passed_as_json(arguments: str, expected: list[str]) -> None:
    events = check_cuts("hermes", f'<tool_call>{{"name": "f"{arguments}}}</tool_call>')
    assert events == [ToolCallStart(0, "f"), *(ArgumentsDelta(0, text) for text in expected)]


def test_halves_of_surrogate_pairs_are_joined_or_replaced() -> None:
    text = '[f(a="\\ud83d\\ude00", b="\\ud800")]'
    assert check_cuts("pythonic", text)[1] == ArgumentsDelta(
        0, '{"a": "\U0001f600", "b": "\ufffd"}'
    )
    written = '<tool_call>{"name": "f", "arguments": "\\ud83d\\ude00\\ud800"}</tool_call>'
    assert check_cuts("hermes", written)[1] == ArgumentsDelta(0, "\U0001f600\ufffd")
    assert check_cuts("pythonic", "[f(a=1e999)]") == [ContentDelta("[f(a=1e999)]")]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('"name": <function-name>, "arguments": x <tool_call>', "hermes", None),
        ("<tool_call><function=f> arguments <think>", None, "qwen3"),
        ("<|python_tag|>", "llama3_json", None),
        ("[TOOL_CALLS]", "mistral", None),
        ('<|channel|>analysis "functions." <|call|>', "openai", "openai_gptoss"),
        (f"{deepseek('tool call begin')} ```json </think>", "deepseek_v3", "deepseek_r1"),
        (f"{deepseek('tool call begin')}", "deepseek_v31", None),
        ("Here is my thought process: Here is my response:", None, "granite"),
        ("plain", None, None),
    ],
)
def test_templates_choose_the_formats(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    found = choose_output_format(template)
    assert (found.tools and found.tools.name) == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


def test_arguments_may_precede_the_name() -> None:
    events = check_cuts("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "f"}}</tool_call>')
    assert events == [ToolCallStart(0, "f"), ArgumentsDelta(0, PARIS)]


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = TOOL_FORMATS["hermes"].make()
    assert parser.push_text('<tool_call>{"name": "f", "arg') == [ToolCallStart(0, "f")]
    assert parser.push_text('uments": {"a": "long') == [ArgumentsDelta(0, '{"a": "long')]
    assert parser.push_text(' text"}') == [ArgumentsDelta(0, ' text"}')]


def test_a_cut_off_call_keeps_what_was_written() -> None:
    events = check_cuts("hermes", '<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert events == [ToolCallStart(0, "f"), ArgumentsDelta(0, '{"a": "lo')]


def test_deep_nesting_ends_a_call() -> None:
    deep = "[" * 10_000
    events = check_cuts("hermes", f'<tool_call>{{"name": "f", "arguments": {deep}')
    assert events[0] == ToolCallStart(0, "f")
    assert parse(TOOL_FORMATS["pythonic"].make(), f"[f(a={deep}") == [ContentDelta(f"[f(a={deep}")]


def test_the_analysis_channel_is_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.f <|constrain|>json<|message|>{PARIS}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    )
    assert check_cuts("openai", text) == [
        ReasoningDelta("I look it up."),
        ToolCallStart(0, "f"),
        ArgumentsDelta(0, PARIS),
        ContentDelta("It rains."),
    ]


# Pieces of which random answers are made: they are often almost a call.
PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            ";",
            " ",
            "\n",
        ),
        *(deepseek("tool call begin"), deepseek("tool sep"), deepseek("tool call end"), "function"),
        *("<|channel|>", "analysis", "to=functions.f", "<|message|>", "<|end|>", "```json"),
        *(
            '{"name": "f", ',
            '"arguments": ',
            '{"a": 1}',
            "{",
            "}",
            "[",
            "]",
            ",",
            '"',
            "\\",
            "f(a=1)",
        ),
        *("<", "text", "é", "f", "(", ")", "null", "1e5"),
    ]
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(pieces=st.lists(PIECES, max_size=25), seed=st.integers(0, 999))
def test_no_text_fails_and_cuts_do_not_matter(name: str, pieces: list[str], seed: int) -> None:
    text = "".join(pieces)
    whole = parse(TOOL_FORMATS[name].make(), text)
    assert parse(TOOL_FORMATS[name].make(), *cut(text, seed)) == whole
    assert parse(TOOL_FORMATS[name].make(), *text) == whole
    indices = [event.index for event in whole if isinstance(event, ToolCallStart)]
    assert indices == list(range(len(indices)))


@given(
    arguments=st.dictionaries(
        st.text(max_size=8).filter(str.isidentifier),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    ),
    seed=st.integers(0, 999),
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek_v31", "openai"])
def test_arguments_come_out_as_they_were_written(
    name: str, arguments: dict[str, object], seed: int
) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    # Harmony's markers are special tokens, which are not told apart from their texts.
    assume(name != "openai" or "<|" not in written)
    text = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
        "deepseek_v31": f"{deepseek('tool call begin')}f{deepseek('tool sep')}{written}",
        "openai": f"<|channel|>commentary to=functions.f<|message|>{written}<|call|>",
    }[name]
    events = parse(TOOL_FORMATS[name].make(), *cut(text, seed))
    assert events == [ToolCallStart(0, "f"), ArgumentsDelta(0, written)]


THINK = OutputFormat(TOOL_FORMATS["hermes"], choose_output_format("<think>").reasoning)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes.", [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
        ("<think>\n", "Hm.\n</think>\n\nYes.", [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
        ("<think>\n", "Hm. <tool_call>", [ReasoningDelta("Hm. <tool_call>")]),
        ("", "Yes.", [ContentDelta("Yes.")]),
        ("", "  <th", [ContentDelta("  <th")]),
        ("", "<think></think>Yes.\n", [ContentDelta("Yes.\n")]),
        ("<think>\n\n</think>\n\n", "Yes.", [ContentDelta("Yes.")]),
        (
            "",
            f"<think>\nHm.\n</think>\n\n{ANSWERS['hermes']}",
            [ReasoningDelta("Hm."), *TWO_CALLS],
        ),
    ],
)
def test_reasoning_is_split_off(prompt: str, text: str, expected: list[OutputEvent]) -> None:
    def make() -> OutputParser:
        assert THINK.reasoning is not None
        return THINK.make_parser(is_reasoning_open=is_reasoning_open(THINK.reasoning, prompt))

    assert parse(make(), text) == expected
    assert parse(make(), *text) == expected
    for seed in range(20):
        assert parse(make(), *cut(text, seed)) == expected


@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", " ", "<", "think", "a", "\n"]), max_size=9
    ),
    is_open=st.booleans(),
)
def test_a_span_keeps_the_text_and_ends_at_the_first_close_tag(
    pieces: list[str], is_open: bool
) -> None:
    text = "".join(pieces)
    span = THINK.make_span(is_reasoning_open=is_open)
    assert span is not None
    parts = [part for char in text for part in span.push_text(char)] + [span.flush()]
    assert "".join(part for part, _ in parts) == text
    reasoning = "".join(part for part, is_reasoning in parts if is_reasoning)
    begins = is_open or text.lstrip().startswith("<think>")
    end = text.find("</think>")
    assert reasoning == ((text if end < 0 else text[: end + 8]) if begins else "")
