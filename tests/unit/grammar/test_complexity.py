"""Texts that are nested too deeply or have too many rules are refused before compiling."""

from __future__ import annotations

import json

import pytest

from outrider.errors import InvalidRequestError
from outrider.grammar.complexity import (
    MAX_NESTING,
    MAX_REFERENCES,
    MAX_RULES,
    check_complexity,
    regex_nesting,
)
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.unit.grammar import attacks


def nested(depth: int) -> str:
    return "(" * depth + "a" + ")" * depth


def deep_schema(depth: int) -> object:
    return {"items": deep_schema(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        (StructuredOutput(StructuredKind.REGEX, nested(MAX_NESTING + 1)), "open brackets"),
        (attacks.lark(f"start: {nested(MAX_NESTING + 1)}"), "open brackets"),
        (attacks.lark(f"start: /{nested(MAX_NESTING + 1)}/"), "open brackets"),
        (attacks.chained_rules(MAX_RULES + 1), "rules"),
        (
            attacks.lark("".join(f"r{n}: {nested(100)}\n" for n in range(300))),
            "levels of all rules",
        ),
        (attacks.schema(deep_schema(MAX_NESTING + 1)), "arrays and objects in one another"),
        (attacks.schema({"anyOf": [{"$ref": "#"}] * (MAX_REFERENCES + 1)}), "references"),
        (
            attacks.schema(
                {"$defs": {f"d{n}": deep_schema(100) for n in range(10)}}
                | {
                    "anyOf": [
                        {"$ref": f"#/$defs/d{n % 10}{'/items' * (n % 17)}"} for n in range(400)
                    ]
                }
            ),
            "levels of all references",
        ),
        (
            attacks.lark(
                "start: %lark {\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(MAX_RULES)) + "\n}"
            ),
            "rules",
        ),
        (
            attacks.lark(
                "start: %json "
                + json.dumps({"anyOf": [{"$ref": "#"}] * (MAX_REFERENCES // 2 + 1)})
                + "| %json "
                + json.dumps({"anyOf": [{"$ref": "#"}] * (MAX_REFERENCES // 2 + 1)})
            ),
            "references",
        ),
        (
            attacks.lark("start: %lark {\n  start: " + nested(MAX_NESTING) + "\n}"),
            "open brackets",
        ),
    ],
)
def test_what_is_too_complex_is_refused_with_what_is_allowed(
    structured: StructuredOutput, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most [0-9]+ {why}") as refused:
        check_complexity(structured)
    assert refused.value.reason == "INVALID_STRUCTURE"


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(StructuredKind.REGEX, nested(MAX_NESTING)),
        StructuredOutput(StructuredKind.REGEX, r"\(" * 500 + "[(]" * 500),
        StructuredOutput(StructuredKind.JSON_OBJECT),
        StructuredOutput(StructuredKind.JSON_SCHEMA, "[" * 100_000),
        attacks.lark('start: "' + "(" * 500 + '" /[(]/ // ' + "(" * 500),
        attacks.chained_rules(),
        attacks.chained_references(),
        attacks.schema({"properties": {"$ref": {"type": "string"}, "n": {"$ref": "#"}}}),
        attacks.schema({"enum": [json.dumps({"$ref": "#"})]}),
        attacks.lark('start: "%json {" // %json {"$ref": "#"'),
        attacks.lark('start: %json {"type": "object"'),
        attacks.lark("start: " + "%json {" * 100),
    ],
)
def test_what_is_in_use_passes_and_so_does_what_the_library_refuses(
    structured: StructuredOutput,
) -> None:
    check_complexity(structured)


def test_numbers_of_nested_schemas_are_those_of_schemas() -> None:
    with pytest.raises(InvalidRequestError, match="number"):
        check_complexity(attacks.lark('start: %json {"maximum": 0.12345678901234567}'))


def test_classes_and_escapes_are_no_groups() -> None:
    assert regex_nesting(r"((a)|[()]+\((?:b(c)))") == 3
