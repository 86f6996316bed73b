"""Answers of chats on their way to clients: reasoning, content and calls, also when resumed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from outrider_router.requests.parsed_answer import (
    AnswerParser,
    ParsedAnswer,
    parse_result,
    split_position,
    to_short_call_id,
)
from outrider_router.requests.request_output import OutputAssembler

from outrider.ids import RequestId
from outrider.spec.tools import OutputParsing, ToolCall, join_call_deltas
from outrider.text.output_parsers.formats import output_format_of
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateResult,
    PromptInfo,
    StreamEvent,
    StreamPosition,
    Usage,
)
from outrider.wire.messages import FinishReason, SpecStats

ID = RequestId("r")
PARSING = OutputParsing(tool_format="hermes", reasoning_format="qwen3")
TEXT = (
    "<think>\nHm.\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n<tool_'
)
INFO = PromptInfo(request_id=ID, prompt_tokens=1, model="m", parsing=PARSING)
FINISH = FinishInfo(
    reason=FinishReason.STOP_TOKEN,
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    stats=SpecStats(),
)
RESULT = GenerateResult(request_id=ID, model="m", text=TEXT, token_ids=(1,), finish=FINISH)


def pieces(size: int) -> list[Delta]:
    """The text in deltas of `size` characters, with a token each."""
    return [Delta(text=TEXT[at : at + size], token_ids=(at,)) for at in range(0, len(TEXT), size)]


async def told(*events: StreamEvent, parser: AnswerParser | None = None) -> list[StreamEvent]:
    got: list[StreamEvent] = []

    async def write(event: StreamEvent) -> None:
        got.append(event)

    answer = ParsedAnswer(write, None if parser is None else lambda: parser)
    for event in events:
        await answer(event)
    return got


def joined(events: list[StreamEvent]) -> tuple[str, str, tuple[ToolCall, ...], list[int]]:
    deltas = [event for event in events if isinstance(event, Delta)]
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.text for delta in deltas),
        join_call_deltas(call for delta in deltas for call in delta.tool_calls),
        [id_ for delta in deltas for id_ in delta.token_ids],
    )


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_a_stream_says_what_the_whole_answer_says(size: int) -> None:
    whole = parse_result(RESULT, PARSING)
    assert (whole.reasoning, whole.text) == ("Hm.", "I look it up.<tool_")
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [
        ("f", '{"a": 1}'),
        ("g", "{}"),
    ]
    reasoning, text, calls, ids = joined(await told(INFO, *pieces(size), FINISH))
    assert (reasoning, text, calls) == (whole.reasoning, whole.text, whole.tool_calls)
    assert ids == list(range(0, len(TEXT), size))


async def test_a_stream_continues_at_any_position_without_loss() -> None:
    events = await told(INFO, *pieces(3), FINISH)
    whole = joined(events)
    deltas = [event for event in events if isinstance(event, Delta)]
    for number in range(1, len(deltas) + 1):
        position = StreamPosition(request_id=ID, characters=deltas[number - 1].characters)
        position, has_ended = split_position(position)
        parser = AnswerParser(ID, PARSING)
        parser.skip_text(TEXT[: position.characters], has_ended=has_ended)
        rest = [
            replace(delta, text=delta.text)
            for delta in pieces(3)
            if delta.token_ids[0] >= position.characters
        ]
        more = await told(*rest, FINISH, parser=parser)
        before = joined(list(deltas[:number]))
        after = joined(more)
        assert before[0] + after[0] == whole[0] and before[1] + after[1] == whole[1]
        parts = [call for event in [*deltas[:number], *more] if isinstance(event, Delta)
                 for call in event.tool_calls]  # fmt: skip
        assert join_call_deltas(parts) == whole[2]


async def test_a_delta_has_one_entry_for_each_call() -> None:
    """Clients take two entries with one index in a first chunk for two calls."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    (delta,) = AnswerParser(ID, OutputParsing(tool_format="hermes")).parse_delta(
        Delta(text=text, token_ids=(1,))
    )
    (call,) = delta.tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": 1}')


@pytest.mark.parametrize("text", ['<tool_call>{"x', '{"name": "Bo', "<thi", "a \n"])
async def test_a_client_that_has_everything_gets_only_the_finish(text: str) -> None:
    for tools in ("hermes", "llama3_json"):
        parser = AnswerParser(ID, OutputParsing(tool_format=tools, reasoning_format="qwen3"))
        parser.skip_text(text, has_ended=True)
        assert await told(FINISH, parser=parser) == [FINISH]


async def test_a_stream_continues_between_the_deltas_of_one_round() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> and text'
    deltas = AnswerParser(ID, OutputParsing(tool_format="hermes")).parse_delta(
        Delta(text=text, token_ids=(1, 2))
    )
    assert [(len(d.tool_calls), d.text, d.token_ids) for d in deltas] == [
        (1, "", (1, 2)),
        (0, "and text", ()),
    ]
    parser = AnswerParser(ID, OutputParsing(tool_format="hermes"))
    parser.skip_text(text[: deltas[0].characters], has_ended=False)
    (rest,) = parser.parse_delta(Delta(text=text[deltas[0].characters :], token_ids=()))
    assert (rest.tool_calls, rest.text) == ((), "and text")


async def test_one_call_is_kept_if_calls_may_not_be_parallel() -> None:
    parsing = replace(PARSING, parallel=False)
    events = await told(replace(INFO, parsing=parsing), *pieces(5), FINISH)
    assert [call.name for call in joined(events)[2]] == ["f"]


async def test_other_answers_pass_unchanged() -> None:
    info = replace(INFO, parsing=None)
    events = [info, *pieces(5), FINISH]
    assert await told(*events) == events
    assert parse_result(RESULT, None) is RESULT


def test_ids_of_calls_depend_on_request_seed_and_index_only() -> None:
    first, again = (parse_result(RESULT, PARSING).tool_calls for _ in range(2))
    other = parse_result(replace(RESULT, request_id=RequestId("s")), PARSING).tool_calls
    # A client may use one request id twice.
    seeded = parse_result(RESULT, replace(PARSING, call_id_seed=1)).tool_calls
    assert first == again
    ids = {call.call_id for call in (*first, *other, *seeded)}
    assert len(ids) == 6 and all(id_.startswith("call_") for id_ in ids)
    mistral = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    found = parse_result(replace(RESULT, text=mistral), OutputParsing(tool_format="mistral"))
    assert len(found.tool_calls[0].call_id) == 9


def test_call_ids_of_other_models_become_short_ones() -> None:
    """Mistral's templates raise an error for ids that have not 9 letters and digits."""
    assert to_short_call_id("a1B2c3D4e") == "a1B2c3D4e"
    others = [
        "",
        "call_abc",
        "call_PTLP8xhu3uwZk4l3nlnrrJha",
        "a1B2c3D4\u00e9",
        "\ud800",
        "a1B2c3D4e\n",
    ]
    short = [to_short_call_id(other) for other in others]
    assert len(set(short)) == len(others) and short == [to_short_call_id(o) for o in others]
    assert all(len(id_) == 9 and id_.isalnum() and id_.isascii() for id_ in short)


def test_only_calls_of_the_tools_are_read_from_answers_without_markers() -> None:
    parsing = OutputParsing(tool_format="llama3_json", tool_names=("f",))
    for name, is_call in (("f", True), ("Bob", False)):
        text = f'{{"name": "{name}", "parameters": {{}}}}'
        found = parse_result(replace(RESULT, text=text), parsing)
        assert (len(found.tool_calls), found.text) == ((1, "") if is_call else (0, text))


@pytest.mark.parametrize("unit", ["<tool_call>", "{", '<tool_call>{"name": "f"}</tool_call>'])
def test_long_answers_take_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        start = time.process_time()
        parse_result(replace(RESULT, text=text), OutputParsing(tool_format="hermes"))
        AnswerParser(ID, PARSING).skip_text(text, has_ended=False)
        AnswerParser(ID, PARSING).parse_delta(Delta(text=text, token_ids=()))
        return time.process_time() - start

    assert any(seconds(1 << 16) < 8 * seconds(1 << 14) + 0.03 for _ in range(3))


class Letters:
    """A table of tokens of which each is a character."""

    strip_start = 0

    def __getitem__(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def assembler(*stops: str) -> OutputAssembler:
    span = output_format_of("", "qwen3").make_span(is_reasoning_open=False)
    return OutputAssembler(Letters(), stops, reasoning=span)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_stop_strings_end_the_answer_and_not_the_reasoning(size: int) -> None:
    text = "<think>a stop b</think>c stop d"
    output = assembler("stop")
    shown = ""
    for at in range(0, len(text), size):
        shown += output.push_tokens([ord(char) for char in text[at : at + size]])
        if output.stop_string:
            break
    assert (shown, output.stop_string) == ("<think>a stop b</think>c ", "stop")
    assert output.num_reasoning_tokens == len("<think>a stop b</think>")


@pytest.mark.parametrize(
    ("text", "count"), [("<think>ab", 9), ("ab<think>", 0), ("  <thi", 0), ("", 0)]
)
def test_reasoning_tokens_are_counted(text: str, count: int) -> None:
    output = assembler()
    shown = output.push_tokens([ord(char) for char in text]) + output.flush()
    assert (shown, output.num_reasoning_tokens) == (text, count)
    assert output.num_tokens == len(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("<|channel|>analysis<|message|>ab<|end|>", 39),
        ("Hi", 0),
        ("<|channel|>commentary<|message|>ab", 32),
        # Content between reasoning is not counted.
        ("<|channel|>commentary<|message|>ab<|end|><|channel|>analysis<|message|>c", 70),
    ],
)
def test_reasoning_tokens_of_harmony_are_counted(text: str, count: int) -> None:
    span = output_format_of("", "openai_gptoss").make_span(is_reasoning_open=False)
    output = OutputAssembler(Letters(), ["c"], reasoning=span)  # type: ignore[arg-type]
    shown = output.push_tokens([ord(char) for char in text]) + output.flush()
    assert (shown, output.num_reasoning_tokens) == (text, count)


def test_harmony_begins_with_reasoning() -> None:
    span = output_format_of("", "openai_gptoss").make_span(is_reasoning_open=False)
    assert span is not None
    assert span.push_text("<|channel|>final<|message|>Hi") == [
        ("<|channel|>final<|message|>", True),
        ("Hi", False),
    ]
