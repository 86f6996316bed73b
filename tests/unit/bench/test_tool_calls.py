"""`outrider bench tool-calls`: its sets of tools, and how it counts answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from outrider_bench.quality.tool_calls import CallAnswer, count_calls, make_requests
from outrider_bench.quality.tool_sets import MAX_TOOLS_OF_A_SET, make_tool_sets

SETS = make_tool_sets(60, seed=0)


def test_sets_are_those_of_the_seed_and_differ() -> None:
    assert make_tool_sets(60, seed=0) == SETS
    assert make_tool_sets(60, seed=1) != SETS
    assert len({json.dumps(tools) for tools in SETS}) == 60


def test_sets_have_distinct_tools_with_valid_schemas() -> None:
    for tools in SETS:
        functions = [tool["function"] for tool in tools]
        assert len({function["name"] for function in functions}) == len(tools)
        assert 1 <= len(tools) <= MAX_TOOLS_OF_A_SET
        for function in functions:
            jsonschema.Draft202012Validator.check_schema(function["parameters"])


def test_all_keywords_are_used() -> None:
    text = json.dumps(SETS)
    for keyword in (
        *("anyOf", "enum", "const", "pattern", "format", "$defs", "$ref", "items", "minItems"),
        *("maxItems", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "maxLength"),
    ):
        assert f'"{keyword}"' in text


def test_requests_share_sets_evenly_and_some_continue_a_conversation() -> None:
    requests = make_requests(300, 60, 0, max_tokens=9)
    assert [request["tools"] for request in requests] == [SETS[n // 5] for n in range(300)]
    assert {request["tool_choice"] for request in requests} == {"required"}
    assert {len(request["messages"]) for request in requests} == {1, 3}
    assert {request["parallel_tool_calls"] for request in requests} == {True, False}


def answer(*calls: tuple[str, str], reason: str = "tool_calls", content: str = "") -> CallAnswer:
    message: dict[str, Any] = {
        "content": content,
        "reasoning": "",
        "tool_calls": [list(call) for call in calls],
        "finish_reason": reason,
    }
    return CallAnswer(message=message, token_ids=(), usage=(1, 1), accepted=0, rounds=1)


TIME = ("get_time", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("found", "counted"),
    [
        (answer(TIME), "valid"),
        (answer(("get_weather", '{"city": "Os'), reason="length"), "cut_by_max_tokens"),
        (answer(("get_time", "{}")), "invalid"),
        (answer(("get_time", '{"city": ')), "invalid"),
        (answer(("get_place", "{}")), "invalid"),
        (answer(TIME, TIME), "invalid"),
        (answer(TIME, content="I call it."), "invalid"),
        (answer(reason="stop", content="7 degrees"), "invalid"),
    ],
)
def test_an_answer_is_valid_cut_or_invalid(found: CallAnswer, counted: str) -> None:
    request = {**make_requests(60, 60, 0, max_tokens=9)[0], "parallel_tool_calls": False}
    counts = count_calls([request], [found])
    assert {name: counts[name] for name in ("valid", "cut_by_max_tokens", "invalid")} == {
        name: int(name == counted) for name in ("valid", "cut_by_max_tokens", "invalid")
    }
