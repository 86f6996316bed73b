"""Grammars that stopped or killed whatever compiled them."""

from __future__ import annotations

import json
from typing import Any

from outrider.spec.structured_output import StructuredKind, StructuredOutput


def lark(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.GRAMMAR, text)


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(value))


def chained_rules(count: int = 2800) -> StructuredOutput:
    """Each rule is the next one: the library recursed once for each."""
    rules = "".join(f"r{n}: r{n + 1}\n" for n in range(count))
    return lark(f'start: r0\n{rules}r{count}: "a"\n')


def chained_references(count: int = 1000) -> StructuredOutput:
    """Each object has one property, which is the next object."""
    nested = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(count)
    }
    return schema({"$ref": "#/$defs/d0", "$defs": {**nested, f"d{count}": {"type": "null"}}})


def large_multiple(of: int = 99999989) -> StructuredOutput:
    """A number modulo a large prime: an automaton of as many states."""
    return schema({"type": "integer", "multipleOf": of})


def optional_properties(count: int = 11_000) -> StructuredOutput:
    properties: dict[str, Any] = {f"p{n}": {} for n in range(count)}
    return schema({"type": "object", "properties": properties, "additionalProperties": False})


def intersected_expressions() -> StructuredOutput:
    """Lengths that are multiples of many primes: the product of their automata."""
    primes = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
    return lark("start: A\nA: " + " & ".join(f"/(.{{{prime}}})*/" for prime in primes))


def ambiguous() -> StructuredOutput:
    """As many derivations as there are ways to put brackets."""
    return lark('start: s\ns: s s | s s s | "a" |')
