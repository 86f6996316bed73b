"""Messages of the harmony format, in the forms that gpt-oss models write.

Source: OpenAI's guide "OpenAI harmony response format" (cookbook.openai.com), and issues of vLLM
and SGLang about gpt-oss.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
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
from outrider.text.output_parsers.formats import output_format_of
from outrider.text.output_parsers.harmony import MARKERS, HarmonyParser

ARGUMENTS = '{"city": "Paris"}'
CALL = [ToolCallStart(0, "f"), ArgumentsDelta(0, ARGUMENTS)]
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
START = "<|start|>assistant"


def parse(parser: OutputParser, *pieces: str) -> list[OutputEvent]:
    events = [event for piece in pieces for event in parser.push_text(piece)]
    return merge_events(events + parser.flush())


def check_cuts(text: str, **options: bool) -> list[OutputEvent]:
    whole = parse(HarmonyParser(**options), text)
    assert parse(HarmonyParser(**options), *text) == whole
    rng = random.Random(len(text))
    for _ in range(20):
        at = rng.randrange(len(text) + 1)
        assert parse(HarmonyParser(**options), text[:at], text[at:]) == whole
    return whole


@pytest.mark.parametrize(
    "header",
    [
        # The recipient in the channel part, and in the role part, with and without a constraint.
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f <|constrain|>json",
        "<|channel|>analysis to=functions.f code",
    ],
)
@pytest.mark.parametrize("before", ["", ANALYSIS + START])
def test_the_recipient_may_be_in_the_role_or_in_the_channel_part(header: str, before: str) -> None:
    """An answer continues `<|start|>assistant`, with which the prompt ends."""
    events = check_cuts(f"{before}{header}<|message|>{ARGUMENTS}<|call|>")
    assert events == [*([ReasoningDelta("Hm.")] if before else []), *CALL]


@pytest.mark.parametrize(
    "text",
    ["to", " to=", "to=functions.f", " to=functions.f is a name", "to=x <|end|>", " to the sea"],
)
def test_text_that_is_no_header_is_content(text: str) -> None:
    shown = text.replace("<|end|>", "").rstrip() if "<|end|>" in text else text
    assert check_cuts(text) == [ContentDelta(shown)]


@pytest.mark.parametrize("constraint", ["", " <|constrain|>json", "<|constrain|>JSON", " json"])
@pytest.mark.parametrize("before", ["", ANALYSIS + START])
def test_the_final_message_may_have_a_constraint(constraint: str, before: str) -> None:
    text = f'{before}<|channel|>final{constraint}<|message|>{{"a": 1}}'
    assert check_cuts(text)[-1] == ContentDelta('{"a": 1}')
    tags = text[: -len('{"a": 1}')]
    for pieces in ([text], list(text)):
        span = output_format_of("", "openai_gptoss").make_span(is_reasoning_open=False)
        assert span is not None
        parts = [part for piece in pieces for part in span.push_text(piece)] + [span.flush()]
        assert "".join(part for part, is_reasoning in parts if is_reasoning) == tags
        assert "".join(part for part, is_reasoning in parts if not is_reasoning) == '{"a": 1}'
        assert span.has_ended and not span.is_reasoning


def test_without_tools_calls_are_content_and_without_a_parser_reasoning_is_too() -> None:
    """vLLM's content is the body of the message, too."""
    text = f"{ANALYSIS}{START} to=functions.f<|channel|>commentary<|message|>{ARGUMENTS}<|call|>"
    assert check_cuts(text) == [ReasoningDelta("Hm."), *CALL]
    content = ContentDelta(ARGUMENTS)
    assert check_cuts(text, reads_calls=False) == [ReasoningDelta("Hm."), content]
    assert check_cuts(text, reads_reasoning=False) == [ContentDelta("Hm."), *CALL]
    for tools, reasoning, expected in (
        ("openai", "openai_gptoss", [ReasoningDelta("Hm."), *CALL]),
        ("", "openai_gptoss", [ReasoningDelta("Hm."), content]),
        ("openai", "", [ContentDelta("Hm."), *CALL]),
    ):
        parser = output_format_of(tools, reasoning).make_parser(is_reasoning_open=False)
        assert parse(parser, text) == expected


PIECES = st.sampled_from(
    [
        *MARKERS,
        " to=functions.f",
        "assistant",
        "analysis",
        "commentary",
        "final",
        "json",
        " ",
        "x",
        "<",
    ]
)


@given(pieces=st.lists(PIECES, max_size=20))
def test_a_span_keeps_the_text_and_agrees_with_the_parser(pieces: list[str]) -> None:
    text = "".join(pieces)
    span = output_format_of("", "openai_gptoss").make_span(is_reasoning_open=False)
    assert span is not None
    parts: list[tuple[str, bool]] = []
    for char in text:
        parts += span.push_text(char)
        assert not span.has_ended or not span.flush()[0]
    parts.append(span.flush())
    assert "".join(part for part, _ in parts) == text
    reasoning = "".join(part for part, is_reasoning in parts if is_reasoning)
    for event in parse(HarmonyParser(), text):
        if isinstance(event, ReasoningDelta) and not span.has_ended:
            assert event.text in reasoning or "<|constrain|>" in text
