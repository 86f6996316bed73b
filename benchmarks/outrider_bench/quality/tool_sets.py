"""Sets of tools for `outrider bench tool-calls`: some written by hand, others from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

Schema = dict[str, Any]
Tool = dict[str, Any]
"""A tool as in the field `tools` of OpenAI's API."""
MAX_TOOLS_OF_A_SET: Final = 8
_VERBS: Final = ("get", "find", "update", "create", "delete", "list", "check", "send", "book")
_THINGS: Final = (
    *("order", "user", "invoice", "ticket", "room", "flight", "file", "report", "device", "price"),
    *("address", "event", "route", "photo", "stock"),
)
_MEMBERS: Final = (
    *("id", "name", "count", "city", "state", "color", "size", "level", "owner", "tags", "note"),
    *("limit", "start", "end", "unit", "kind", "score", "is_open", "max-age", "x_2", "größe"),
)
_WORDS: Final = ("red", "green", "small", "large", "open", "closed", "north", "south", "a/b", "é")
_PATTERNS: Final = ("^[A-Z]{2}-[0-9]{3}$", "^[a-z]{3,8}$", "^#[0-9a-f]{6}$", "^v[0-9]\\.[0-9]$")


def make_tool_sets(count: int, seed: int) -> list[list[Tool]]:
    """Return `count` sets of 1 to 8 tools with distinct names. The sets written by hand come first.

    All texts, arrays and integers are bounded, so that a small model ends its calls.
    """
    rng = random.Random(seed)
    written = [list(tools) for tools in _WRITTEN[:count]]
    return written + [_random_set(rng) for _ in range(count - len(written))]


def _random_set(rng: random.Random) -> list[Tool]:
    names = [f"{verb}_{thing}" for verb in _VERBS for thing in _THINGS]
    chosen = rng.sample(names, rng.randint(1, MAX_TOOLS_OF_A_SET))
    return [_tool(name, f"{name.replace('_', ' ')}.", _arguments(rng)) for name in chosen]


def _tool(name: str, description: str, parameters: Schema) -> Tool:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _object(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """Return the schema of an object. All properties are required if `required` is None."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def _arguments(rng: random.Random) -> Schema:
    if rng.random() < 0.05:
        return _object({})
    schema = _random_object(rng, 2)
    if rng.random() < 0.25:
        schema["$defs"] = {"part": _random_object(rng, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["properties"]["parts"] = {
            "type": "array",
            "items": {"$ref": "#/$defs/part"},
            "maxItems": 2,
        }
    return schema


def _random_object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_MEMBERS, rng.randint(1, 4 if depth == 2 else 2))
    required = names if rng.random() < 0.5 else rng.sample(names, rng.randint(0, len(names)))
    return _object({name: _value(rng, depth - 1) for name in names}, required)


def _value(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-20, 20)
    kinds: list[Schema] = [
        {"type": "string", "maxLength": rng.choice([6, 12, 20])},
        {"type": "string", "minLength": 2, "maxLength": 8, "description": "A short text."},
        {"type": "string", "enum": rng.sample(_WORDS, rng.randint(1, 4))},
        {"enum": [rng.choice(_WORDS), rng.randint(0, 9), None, True]},
        {"type": "string", "pattern": rng.choice(_PATTERNS)},
        {"type": "string", "format": rng.choice(["date", "time", "uuid"])},
        {"type": "integer", "minimum": low, "maximum": low + rng.choice([1, 9, 100, 5000])},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 60, "multipleOf": 5},
        {"type": "number", "minimum": 0, "maximum": 10},
        {"type": "boolean"},
        {"const": rng.choice(_WORDS)},
        {"type": ["string", "null"], "maxLength": 10},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    ]
    if depth > 0:
        first, second = _random_object(rng, depth), _random_object(rng, depth)
        items = _value(rng, 0)
        kinds += [
            {"type": "array", "items": items, "minItems": rng.randint(0, 2), "maxItems": 3},
            {"type": "array", "items": first, "maxItems": 2},
            first,
            {"anyOf": [first, second, {"type": "null"}]},
        ]
    return rng.choice(kinds)


_TEXT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 24}
_CITY: Final[Schema] = {**_TEXT, "description": "City, such as Oslo."}
_DATE: Final[Schema] = {"type": "string", "format": "date"}
_WRITTEN: Final[tuple[tuple[Tool, ...], ...]] = (
    (
        _tool(
            "get_weather",
            "Weather at a place.",
            _object(
                {
                    "city": _CITY,
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                },
                ["city"],
            ),
        ),
        _tool("get_time", "Time in a city.", _object({"city": _CITY})),
    ),
    (
        _tool(
            "search_flights",
            "Find flights between two airports.",
            _object(
                {
                    "origin": {"type": "string", "pattern": "^[A-Z]{3}$"},
                    "destination": {"type": "string", "pattern": "^[A-Z]{3}$"},
                    "date": _DATE,
                    "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
                    "cabin": {"enum": ["economy", "premium", "business", "first"]},
                },
                ["origin", "destination", "date"],
            ),
        ),
        _tool(
            "book_hotel",
            "Book a room.",
            _object(
                {
                    "city": _CITY,
                    "stay": _object({"arrival": _DATE, "departure": _DATE}),
                    "guests": {
                        "type": "array",
                        "items": _object(
                            {
                                "name": _TEXT,
                                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                            },
                            ["name"],
                        ),
                        "minItems": 1,
                        "maxItems": 3,
                    },
                }
            ),
        ),
        _tool("list_bookings", "All bookings of the user.", _object({})),
    ),
    (
        _tool(
            "edit_file",
            "Replace lines of a file.",
            _object(
                {
                    "path": {"type": "string", "pattern": "^[a-z_]{1,12}\\.(py|md|txt)$"},
                    "edits": {
                        "type": "array",
                        "items": {"$ref": "#/$defs/edit"},
                        "minItems": 1,
                        "maxItems": 2,
                    },
                }
            )
            | {
                "$defs": {
                    "edit": _object(
                        {
                            "line": {"type": "integer", "minimum": 1, "maximum": 9999},
                            "text": {"type": "string", "maxLength": 30},
                        }
                    )
                }
            },
        ),
        _tool(
            "run_tests",
            "Run tests.",
            _object(
                {
                    "pattern": {"type": ["string", "null"], "maxLength": 16},
                    "timeout_s": {"type": "number", "minimum": 1, "maximum": 600},
                    "is_verbose": {"type": "boolean"},
                },
                [],
            ),
        ),
    ),
    (
        _tool(
            "query_orders",
            "Search orders by a filter.",
            _object({"filter": {"$ref": "#/$defs/filter"}})
            | {
                "$defs": {
                    "filter": {
                        "anyOf": [
                            {"$ref": "#/$defs/test"},
                            _object({"not": {"$ref": "#/$defs/test"}}),
                            _object(
                                {
                                    "all": {
                                        "type": "array",
                                        "items": {"$ref": "#/$defs/test"},
                                        "minItems": 1,
                                        "maxItems": 2,
                                    }
                                }
                            ),
                        ]
                    },
                    "test": _object(
                        {
                            "field": {"enum": ["price", "state", "customer"]},
                            "is": {"enum": ["=", "<", ">"]},
                            "value": {
                                "anyOf": [
                                    {"type": "integer", "minimum": 0, "maximum": 100000},
                                    {"type": "string", "maxLength": 16},
                                ]
                            },
                        }
                    ),
                }
            },
        ),
    ),
    (
        _tool(
            "send_email",
            "Send a mail.",
            _object(
                {
                    "to": {"type": "string", "pattern": "^[a-z]{2,10}@[a-z]{2,10}\\.com$"},
                    "subject": _TEXT,
                    "body": {"type": "string", "maxLength": 40},
                    "priority": {"type": "integer", "enum": [1, 2, 3]},
                }
            ),
        ),
        _tool(
            "calculate",
            "Compute a value.",
            _object(
                {
                    "operation": {"enum": ["add", "subtract", "multiply", "divide"]},
                    "left": {"type": "integer", "minimum": -10000, "maximum": 10000},
                    "right": {"type": "integer", "minimum": -10000, "maximum": 10000},
                }
            ),
        ),
        _tool("end-conversation_2", "Say goodbye.", {"type": "object", "properties": {}}),
    ),
)
"""Sets of tools as agents use them."""
