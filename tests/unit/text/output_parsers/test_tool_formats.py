"""Tool calls in each format, whole and cut anywhere; what is no call is content."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

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
from outrider.text.output_parsers.markers import MAX_HELD_CHARS

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
# function calling, Llama's prompt formats, Mistral's tokenizer guide, DeepSeek's model cards,
# OpenAI's guide of the harmony format, and Granite's prompt engineering guide (IBM).
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
    "granite": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_time", "arguments": {TIME}}}]'
    ),
    "pythonic": '[get_weather(city="Paris", days=2), get_time(zone=\'UTC "x" </tool_call> é\')]',
}
MISTRAL_13 = f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time{TIME}"
# mistral-common's instruct tokenizer of version 11: only this version writes the id of a call.
MISTRAL_11 = (
    f"[TOOL_CALLS]get_weather[CALL_ID]bbc5b7ede[ARGS]{PARIS}"
    f"[TOOL_CALLS]get_time[CALL_ID]VvvODy9mT[ARGS]{TIME}"
)


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


def check_cuts(name: str, text: str, tools: Sequence[str] | None = None) -> list[OutputEvent]:
    """Parse the text in many ways, and return the events, which are the same in all."""
    whole = parse(TOOL_FORMATS[name].make(tools), text)
    assert parse(TOOL_FORMATS[name].make(tools), *text) == whole
    for seed in range(40):
        assert parse(TOOL_FORMATS[name].make(tools), *cut(text, seed)) == whole, cut(text, seed)
    return whole


def test_every_format_has_an_example() -> None:
    assert set(ANSWERS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", ANSWERS)
def test_two_calls_are_read_however_they_are_cut(name: str) -> None:
    assert check_cuts(name, ANSWERS[name]) == TWO_CALLS


@pytest.mark.parametrize("text", [MISTRAL_13, MISTRAL_11])
def test_newer_mistral_models_write_names_before_arguments(text: str) -> None:
    assert check_cuts("mistral", text) == TWO_CALLS


def test_newer_granite_models_write_the_marker_as_text() -> None:
    """Granite 3.1, as the documentation of vLLM's parser `granite` says."""
    text = ANSWERS["granite"].replace("<|tool_call|>", "<tool_call> ")
    assert check_cuts("granite", text) == TWO_CALLS
    assert check_cuts("granite", f"{text} Done.") == [*TWO_CALLS, ContentDelta("Done.")]


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


F = '{"name": "f", "arguments": {"a": 1}}'
LATER: list[tuple[str, str, str]] = [
    # (format, text before the first character that is no call of the first one, that text)
    ("hermes", f"<tool_call>[{F}", ', {"nam": 5} x]</tool_call> after'),
    ("hermes", f"<tool_call>[{F}", ', {"name": "g'),
    ("hermes", f"<tool_call>[{F}", ", 5]</tool_call>"),
    ("mistral", f"[TOOL_CALLS] [{F}", ' {"arguments": {"x": 2}, "name": ""}] after'),
    ("mistral", f"[TOOL_CALLS] [{F}", ', {"arguments": {"x": 2'),
    ("granite", f"<|tool_call|>[{F}", ', {"name": 5, "arguments": {}}]'),
    ("llama3_json", f"<|python_tag|>[{F}", ', {"arguments": {"x": 2}, "nam'),
    ("llama3_json", F, '; {"name": "g", "x": 5, "y'),
    ("llama3_json", F, '; {"name": "g" "x"}'),
    ("pythonic", "[f(a=1)", ", g(b="),
    ("pythonic", "[f(a=1)", ", g(b 2), h(c=3)]"),
    ("pythonic", "[f(a=1)", " and g(b=2)]"),
    ("pythonic", "[f(a=1)", ", 5]"),
]


@pytest.mark.parametrize(("name", "before", "rest"), LATER)
def test_a_later_call_that_is_malformed_before_its_name_is_content(
    name: str, before: str, rest: str
) -> None:
    call = [ToolCallStart(0, "f"), ArgumentsDelta(0, '{"a": 1}')]
    assert check_cuts(name, before + rest) == [*call, ContentDelta(rest.lstrip())]
    # An answer that was cut off between two calls has no content.
    for end in ("", ",", ", ", ",\n"):
        if before.startswith("{"):
            end = end.replace(",", ";")
        assert check_cuts(name, before + end) == call


def test_white_space_before_a_call_that_is_cut_off_is_no_content() -> None:
    assert check_cuts("hermes", f"Hm. \n<tool_call>{F[:-4]}") == [
        ContentDelta("Hm."),
        ToolCallStart(0, "f"),
        ArgumentsDelta(0, '{"a":'),
    ]


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


WEATHER = ["get_weather"]
NO_CALLS = [
    # No tool of the request.
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 5}}'),
    ("llama3_json", '<|python_tag|>{"name": "Bob", "parameters": {}}'),
    ("pythonic", "[Bob(age=5)]"),
    # No arguments, although Llama's template demands "parameters" for each call.
    ("llama3_json", '{"name": "get_weather"}'),
    ("llama3_json", '{"name": "get_weather", "age": 5}'),
    ("llama3_json", '{"name": "get_weather", "age": '),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_without_a_marker_only_calls_of_the_tools_are_read(name: str, text: str) -> None:
    assert check_cuts(name, text, WEATHER) == [ContentDelta(text)]


@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_a_call_of_a_tool_is_read_whatever_else_it_has(key: str) -> None:
    for text in (
        f'{{"name": "get_weather", "{key}": {PARIS}}}',
        f'{{"type": "function", "name": "get_weather", "x": [1], "{key}": {PARIS}}}',
        f'{{"type": "function", "{key}": {PARIS}, "name": "get_weather"}}',
    ):
        assert check_cuts("llama3_json", text, WEATHER) == TWO_CALLS[:2]
    text = '[get_weather(city="Paris", days=2)]'
    assert check_cuts("pythonic", text, WEATHER) == TWO_CALLS[:2]


@pytest.mark.parametrize("separator", ["; ", ";", " ;\n", "\n"])
def test_calls_of_llama_are_separated_by_semicolons(separator: str) -> None:
    """The separator of vLLM's parser `llama3_json` for several calls."""
    calls = [
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        f'{{"name": "get_time", "parameters": {TIME}}}',
    ]
    text = separator.join(calls)
    assert check_cuts("llama3_json", text, ["get_weather", "get_time"]) == TWO_CALLS
    assert check_cuts("llama3_json", text + separator) == TWO_CALLS
    second = separator.strip() + separator[-1:].strip(";") + calls[1]
    content = ContentDelta(second.lstrip())
    assert check_cuts("llama3_json", text, WEATHER)[:2] == TWO_CALLS[:2]
    assert check_cuts("llama3_json", text, WEATHER)[2:] == [content]


def test_a_marker_makes_a_call_of_an_unknown_tool_a_call() -> None:
    """As in vLLM, so that the client can tell the model that there is no such tool."""
    for name in sorted(set(ANSWERS) - {"llama3_json", "pythonic"}):
        assert check_cuts(name, ANSWERS[name], ["other"]) == TWO_CALLS


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("hermes", "\n</tool_call>"),
        ("deepseek_v3", deepseek("tool call end")),
        ("deepseek_v31", deepseek("tool call end")),
    ],
)
def test_text_behind_a_call_without_its_end_marker_is_content(name: str, end: str) -> None:
    text = ANSWERS[name].replace(deepseek("tool calls end"), "").replace(end, "")
    assert check_cuts(name, text) == TWO_CALLS
    assert check_cuts(name, f"{text}\nIt rains.\n") == [*TWO_CALLS, ContentDelta("It rains.\n")]
    first = text[: text.index("get_time")]
    begin = max(first.rfind("<tool_call>"), first.rfind(deepseek("tool call begin")))
    between = f"{text[:begin]} And: {text[begin:]}"
    assert check_cuts(name, between) == [*TWO_CALLS[:2], ContentDelta("And:"), *TWO_CALLS[2:]]
    # Much text is not held back until the end.
    parser = TOOL_FORMATS[name].make()
    for long in ("x" * MAX_HELD_CHARS, "x" * (MAX_HELD_CHARS + 1)):
        parser = TOOL_FORMATS[name].make()
        events = merge_events(parser.push_text(text + long + end.strip()))
        is_end = len(long) <= MAX_HELD_CHARS
        assert events == [*TWO_CALLS, *([] if is_end else [ContentDelta(long + end.strip())])]


def test_a_name_has_at_most_as_many_characters_as_that_of_a_tool() -> None:
    for length in (64, 65):
        name = "x" * length
        start = [ToolCallStart(0, name), ArgumentsDelta(0, "{}")]
        for format_name, text in (
            ("hermes", f'<tool_call>{{"name": "{name}"}}</tool_call>'),
            ("llama3_json", f'{{"name": "{name}", "parameters": {{}}}}'),
            ("mistral", f"[TOOL_CALLS]{name}[ARGS]{{}}"),
            ("mistral", f"[TOOL_CALLS]{name}{{}}"),
            ("deepseek_v31", f"{deepseek('tool call begin')}{name}{deepseek('tool sep')}{{}}"),
            ("openai", f"<|channel|>commentary to=functions.{name}<|message|>{{}}"),
            ("pythonic", f"[{name}()]"),
        ):
            events = check_cuts(format_name, text)
            assert (events == start) == (length == 64), text
            assert length == 64 or all(isinstance(event, ContentDelta) for event in events)
    written = '<tool_call>{"name": "' + "\\u0041" * 64 + '"}</tool_call>'
    assert check_cuts("hermes", written)[0] == ToolCallStart(0, "A" * 64)


def test_a_marker_behind_a_name_that_is_too_long_begins_a_call() -> None:
    text = f"[TOOL_CALLS]{'x' * 64}[TOOL_CALLS]f{{}}"
    assert check_cuts("mistral", text) == [
        ContentDelta(text[:-15]),
        ToolCallStart(0, "f"),
        ArgumentsDelta(0, "{}"),
    ]


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("hermes", '<tool_call>{"arguments": "'),
        ("granite", '<tool_call>[{"x": "'),
        ("llama3_json", '{"name": "f", "x": "'),
        ("pythonic", '[f(a="'),
    ],
)
def test_text_that_may_be_a_call_is_held_up_to_a_bound(name: str, begin: str) -> None:
    text = begin + "x" * (MAX_HELD_CHARS + 100)
    parser = TOOL_FORMATS[name].make()
    assert not parser.push_text(text[:MAX_HELD_CHARS])
    assert merge_events(parser.push_text(text[MAX_HELD_CHARS:])) == [ContentDelta(text)]
    pieces = [text[at : at + 999] for at in range(0, len(text), 999)]
    assert parse(TOOL_FORMATS[name].make(), *pieces) == [ContentDelta(text)]


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
        # Granite 3.0, 3.1 and 3.3, and Granite 4.
        ("<|start_of_role|>available_tools<|end_of_role|>", "granite", None),
        ("<|start_of_role|> respond only with <|tool_call|> arguments", "granite", None),
        ("<|start_of_role|> <tool_call> arguments", "granite", None),
        ("<|start_of_role|> <tool_call></tool_call> arguments", "hermes", None),
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
            "[CALL_ID]",
            "[ARGS]",
            "<|tool_call|>",
            "<|python_tag|>",
            ";",
            " ",
            "\n",
        ),
        *(deepseek("tool call begin"), deepseek("tool sep"), deepseek("tool call end"), "function"),
        *("<|channel|>", "analysis", "to=functions.f", "<|message|>", "<|end|>", "```json"),
        *(
            " to=functions.g",
            "<|start|>",
            "assistant",
            "commentary",
            "final",
            "<|constrain|>",
            "```",
        ),
        *('"name": "f"', '"parameters": ', '"x": '),
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
