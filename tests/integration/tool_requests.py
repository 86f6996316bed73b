"""Tools and conversations that the tests of tool calls send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema

PLACE = {"type": "string", "minLength": 1, "maxLength": 8}
WEATHER = {
    "type": "object",
    "properties": {
        "city": PLACE,
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2}},
    "required": ["places"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [PLACE, {"type": "null"}]}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "get-time_2": CLOCK}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: object) -> dict[str, Any]:
    """Return a tool as the API takes it."""
    function: dict[str, Any] = {"name": name, **fields}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", WEATHER, description="Weather at a place."),
    tool("get-time_2", CLOCK),
]


def called(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    """Return a message of the assistant with one call."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def check_calls(calls: Sequence[tuple[str, str]]) -> None:
    """Fail unless there are calls, and the arguments of each fit its tool's schema."""
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
