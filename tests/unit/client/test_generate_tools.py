"""`outrider generate`: tools, and answers that are made of reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from outrider.client.commands import main
from outrider.client.commands.answer_text import AnswerText
from outrider.client.commands.tool_files import read_tools
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.spec.tools import MAX_TOOLS, ToolCallDelta
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import Delta
from tests.unit.client.served import Served

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A router that reads reasoning and calls, and a verifier whose answers a test chooses."""
    with Served(tmp_path_factory.mktemp("served"), **PARSERS) as running:
        yield running


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOL]))
    return file


def generate(served: Served, answer: str, *flags: str) -> int:
    """Run the command against a model that writes this answer."""
    assert served.verifier is not None
    ids = Tokenizer.load(served.directory).encode(answer)
    served.verifier.script = lambda spec: ids
    arguments = ["generate", "--prompt", "Hi", "--max-tokens", str(len(ids))]
    return main.main([*arguments, "--router", served.address, *flags])


def delta(text: str = "", reasoning: str = "", *calls: ToolCallDelta) -> Delta:
    return Delta(text=text, token_ids=(), reasoning=reasoning, tool_calls=calls)


def show(*deltas: Delta, **options: Any) -> str:
    text = AnswerText(**options)
    return "".join(map(text.push_delta, deltas)) + text.finish()


def test_content_is_printed_as_it_is() -> None:
    assert show(delta("One, "), delta("two.\n")) == "One, two.\n"


def test_reasoning_stands_between_marks() -> None:
    deltas = delta(reasoning="Hm"), delta(reasoning="."), delta("Yes."), delta(" No.")
    assert show(*deltas) == "[reasoning]\nHm.\n[end of reasoning]\n\nYes. No."
    assert show(*deltas, shows_reasoning=False) == "Yes. No."
    assert show(*deltas[:1]) == "[reasoning]\nHm\n[end of reasoning]"
    dimmed = show(*deltas[:1], is_dimmed=True)
    assert dimmed.count("\x1b[2m") == dimmed.count("\x1b[0m") == 3


def test_every_call_has_a_line_of_its_own() -> None:
    calls = (
        ToolCallDelta(index=0, call_id="c0", name="f"),
        ToolCallDelta(index=0, arguments='{"a": 1}'),
        ToolCallDelta(index=1, call_id="c1", name="g", arguments="{}"),
    )
    shown = '[tool call] f({"a": 1})\n[tool call] g({})'
    assert show(delta("", "", *calls)) == shown
    assert show(*(delta("", "", call) for call in calls)) == shown
    assert show(delta("So:", "", calls[0]), delta("Done")) == "So:\n[tool call] f()\nDone"


def test_reasoning_and_calls_are_printed_while_they_arrive_and_at_once(
    served: Served, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = f"<think>hm</think>{CALL}"
    call = '[tool call] f({"a": 1})\n\n'
    for flags in ((), ("--concurrency", "2")):
        assert generate(served, answer, "--tools", str(tools), *flags) == 0
        shown = capsys.readouterr().out
        assert shown == f"> Hi\n[reasoning]\nhm\n[end of reasoning]\n\n{call}"
        assert generate(served, answer, "--tools", str(tools), "--hide-reasoning", *flags) == 0
        assert capsys.readouterr().out == f"> Hi\n{call}"
    assert generate(served, CALL, "--tools", str(tools), "--tool-choice", "none") == 0
    assert capsys.readouterr().out == f"> Hi\n{CALL}\n\n"


def test_json_has_the_calls_in_openais_form(
    served: Served, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(served, f"<think>hm</think>{CALL}", "--tools", str(tools), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["reasoning"]) == ("", "hm")
    (call,) = answer["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert generate(served, "Yes.", "--json") == 0
    assert {"reasoning", "tool_calls"}.isdisjoint(json.loads(capsys.readouterr().out))


def test_a_file_may_have_one_tool_or_a_list(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    for content in (TOOL, [TOOL]):
        file.write_text(json.dumps(content))
        assert [tool.name for tool in read_tools(file)] == ["f"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[{", "is not JSON"),
        (b"[]", "holds no tools"),
        (b"5", r"tools\[0\] must be a Tool or"),
        (b'{"name": "f"}', r"tools\[0\] must be"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (json.dumps([TOOL] * (MAX_TOOLS + 1)).encode(), f"at most {MAX_TOOLS} tools"),
    ],
)
def test_a_bad_tools_file_is_named_with_its_fault(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "tools.json"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=says) as raised:
        read_tools(file)
    assert str(file) in raised.value.message and len(raised.value.message) < 400
    with pytest.raises(NotFoundError, match="nothing.json"):
        read_tools(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tools", "/nowhere.json"], "no tools file at /nowhere.json"),
        (["--tool-choice", "required"], "--tool-choice needs --tools"),
    ],
)
def test_a_bad_flag_exits_with_status_2_before_anything_is_asked(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", "--prompt", "a", "--router", "127.0.0.1:1", *flags]) == 2
    assert capsys.readouterr().err == f"outrider: {says}\n"


def test_a_name_that_is_no_tool_exits_with_status_2(
    served: Served, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(served, "a", "--tools", str(tools), "--tool-choice", "g") == 2
    assert "tool_choice must be auto, none, required or the name" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["[1]", "{", "5"])
def test_template_variables_are_a_json_object(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["generate", "--prompt", "a", "--chat-template-kwargs", value])
    assert "JSON" in capsys.readouterr().err
