"""docs/agents.md shows the examples as they are, and their tools survive every call."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.client import ToolCall
from outrider.spec.tools import MAX_TEMPLATE_VARIABLES_BYTES, MAX_TOOL_CALLS, MAX_TOOLS
from outrider.text.output_parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.unit.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "agents.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_page_shows_every_example_as_it_is() -> None:
    shown = list(blocks(PAGE, "python"))
    assert [path.name for path in EXAMPLES] == ["agent_http.py", "agent_sdk.py"]
    for path in EXAMPLES:
        assert path.read_text() in shown, path.name
        assert f"examples/{path.name}" in PAGE.read_text()


def test_the_page_names_every_format_and_limit() -> None:
    text = PAGE.read_text()
    for name in (*TOOL_FORMATS, *REASONING_FORMATS):
        assert f"| `{name}` |" in text, name
    assert f"{MAX_TOOLS:,} tools" in text
    assert f"{MAX_TOOL_CALLS} calls" in text
    assert f"{MAX_TEMPLATE_VARIABLES_BYTES >> 10} KiB" in text


def call_of(name: str, arguments: str, *, is_openai: bool) -> Any:
    if not is_openai:
        return ToolCall(call_id="c", name=name, arguments=arguments)
    return SimpleNamespace(id="c", function=SimpleNamespace(name=name, arguments=arguments))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("look_up_temperature", '{"city": "Oslo"}', "-3 degrees Celsius"),
        ("calculate", '{"operation": "subtract", "a": 29, "b": -3}', "32"),
        ("calculate", '{"operation": "multiply", "a": 0.1, "b": 3}', "0.3"),
        ("look_up_temperature", '{"city": "Atlantis"}', "error: ValueError: no temperature"),
        ("look_up_temperature", '{"city": 5}', "error: AttributeError"),
        ("look_up_temperature", '{"town": "Oslo"}', "error: TypeError"),
        ("look_up_temperature", '{"city": "Os', "error: JSONDecodeError"),
        ("look_up_temperature", "[]", "error: TypeError"),
        ("calculate", '{"operation": "divide", "a": 1, "b": 0}', "error: DivisionByZero"),
        ("calculate", '{"operation": "power", "a": 1, "b": 0}', "error: KeyError"),
        ("calculate", '{"operation": "add", "a": "x", "b": {}}', "error: InvalidOperation"),
        ("delete_everything", "{}", "error: KeyError: 'delete_everything'"),
        ("calculate", "", "error: JSONDecodeError"),
    ],
)
def test_a_call_has_a_result_or_an_error_as_text(
    path: Any, name: str, arguments: str, result: str
) -> None:
    is_openai = path.stem == "agent_http"
    run_call = runpy.run_path(str(path))["run_call"]
    assert run_call(call_of(name, arguments, is_openai=is_openai)).startswith(result)
