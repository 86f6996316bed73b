"""The time that parsers take is proportional to the length of the text, also of hostile text."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from outrider.text.output_parsers.events import OutputParser
from outrider.text.output_parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputFormat,
)

HOSTILE = [
    "{",
    "[",
    "<",
    " ",
    "\n",
    "`",
    "x ",
    "<tool_call>",
    '<tool_call>{"name": "',
    '<tool_call>{"name": "f"}',
    '<tool_call>{"name": "f"}</tool_call>',
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f{}",
    "[TOOL_CALLS]f[CALL_ID]1[ARGS]",
    "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>f\n```json\n{}",
    "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>{}",
    "<|channel|>",
    "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
    "<|end|>",
    "<think></think>",
    "f(a=1), ",
]
BEGINNINGS = ["", '{"x": "', "[f(a=[", '<tool_call>{"arguments": "', "[TOOL_CALLS]"]


def seconds(make: Callable[[], OutputParser], text: str, size: int) -> float:
    """Time of the processor, in seconds, to parse a text in pieces of a size."""
    parser = make()
    start = time.process_time()
    for at in range(0, len(text), size):
        parser.push_text(text[at : at + size])
    parser.flush()
    return time.process_time() - start


def check(make: Callable[[], OutputParser], begin: str, unit: str, size: int) -> None:
    """Check that four times the text takes about four times as long, not sixteen times."""
    short, long = (begin + unit * (length // len(unit)) for length in (1 << 13, 1 << 15))
    for _ in range(3):
        # A few milliseconds are in the noise of other work.
        if seconds(make, long, size) < 8 * seconds(make, short, size) + 0.03:
            return
    pytest.fail(f"more than linear: {begin!r} and {unit!r} in pieces of {size}")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_tool_calls_take_linear_time(name: str) -> None:
    for unit in HOSTILE:
        check(TOOL_FORMATS[name].make, "", unit, 1 << 30)
    for begin in BEGINNINGS:
        for unit in ("{", " "):
            check(TOOL_FORMATS[name].make, begin, unit, 1 << 30)
            check(TOOL_FORMATS[name].make, begin, unit, 4)


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("unit", [" ", "<", "x", "<think>", "<|channel|>analysis<|message|>x"])
def test_reasoning_takes_linear_time(name: str, unit: str) -> None:
    output_format = OutputFormat(None, REASONING_FORMATS[name])
    for is_open in (False, True):

        def make(is_open: bool = is_open) -> OutputParser:
            return output_format.make_parser(is_reasoning_open=is_open)

        check(make, "", unit, 1 << 30)
        check(make, "", unit, 4)
