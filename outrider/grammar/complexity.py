"""Complexity limits of grammar texts, checked before the grammar library reads them. Pure.

The library compiles recursively, so nested brackets and chains of rules or references cost stack.
These limits keep the stack that an accepted text needs far below
`outrider.grammar.matcher_compiler.STACK_BYTES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from outrider.errors import InvalidRequestError
from outrider.grammar.json_numbers import check_numbers
from outrider.grammar.schema_recursion import check_recursion, find_target
from outrider.spec.structured_output import StructuredKind, StructuredOutput

MAX_NESTING: Final = 128
"""Maximum nesting depth of brackets in a regular expression or a Lark grammar, and of arrays and
objects in a JSON schema."""
MAX_RULES: Final = 4_000
"""Maximum number of rules and terminals that a Lark grammar may define, with the grammars nested in
it."""
MAX_REFERENCES: Final = 4_000
"""Maximum number of references in a JSON schema, and in all schemas nested in a Lark grammar."""
MAX_TOTAL_NESTING: Final = 16_000
"""Maximum sum of nesting depths in a text. For a JSON schema, it is the sum over the schema and all
parts that it refers to. For a Lark grammar, it is the sum over all rules, and each rule adds one
level; the sums of nested schemas count, too. The library cannot recurse more deeply than this
sum."""

_TOKEN: Final = re.compile(
    r"""
    (?P<string> " (?: \\. | [^"\\\n] )* " )
    | (?P<comment> // [^\n]* | \# [^\n]* )
    | (?P<regex> / (?: \\. | [^/\\\n] )+ / )
    | (?P<json> %json \s* (?= \{ ) )
    | (?P<rule> ^ [ \t]* [?!]? [A-Za-z_] \w* (?= [^:\n"/|()]* : ) )
    | (?P<open> [(\[{] )
    | (?P<close> [)\]}] )
    """,
    re.VERBOSE | re.MULTILINE,
)
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.DOTALL)
"""A class of characters in a regular expression."""


def check_complexity(structured: StructuredOutput) -> None:
    """Refuse a schema, pattern or grammar that exceeds a complexity limit: nesting depth, number of
    rules or references, numbers that llguidance, the grammar library, cannot represent exactly, or
    references that lead only to themselves.

    Raises InvalidRequestError (reason INVALID_STRUCTURE), whose message says what is allowed. A
    malformed text passes, because the library reports what is wrong with it.
    """
    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            _check_schema(structured.text)
            check_numbers(structured.text)
        case StructuredKind.REGEX:
            _require(regex_nesting(structured.text), MAX_NESTING, "open brackets in one another")
        case StructuredKind.GRAMMAR:
            _check_lark(structured.text)
        case StructuredKind.JSON_OBJECT:
            pass


def _require(found: int, most: int, what: str) -> None:
    if found > most:
        raise InvalidRequestError(
            f"structured output: at most {most} {what} are allowed, got {found}",
            reason="INVALID_STRUCTURE",
            param="structured_outputs",
        )


def regex_nesting(text: str) -> int:
    """Return the maximum nesting depth of the groups in a regular expression. Parentheses in
    character classes do not count."""
    text = _CLASS.sub("", re.sub(r"\\.", "", text, flags=re.DOTALL))
    depth = most = 0
    for mark in re.findall(r"[()]", text):
        depth = depth + 1 if mark == "(" else max(0, depth - 1)
        most = max(most, depth)
    return most


def _check_lark(text: str) -> None:
    rules = depth = most = total = references = 0
    schemas: list[object] = []
    for token in _TOKEN.finditer(text):
        match token.lastgroup:
            case "rule":
                # At any depth: `%lark { ... }` nests grammars.
                rules += 1
                total, most = total + most + 1, depth
            case "open":
                depth += 1
                most = max(most, depth)
                _require(depth, MAX_NESTING, "open brackets in one another")
            case "close":
                depth = max(0, depth - 1)
            case "regex":
                nesting = regex_nesting(token.group())
                _require(nesting, MAX_NESTING, "open brackets in one another")
                most = max(most, depth + nesting)
            case "json":
                schemas.append(_nested_schema(text, token.end()))
                cost = _schema_cost(schemas[-1])
                total, references = total + cost.total_nesting, references + cost.references
            case _:
                pass
    _require(rules, MAX_RULES, "rules")
    _require(references, MAX_REFERENCES, "references")
    _require(total + most, MAX_TOTAL_NESTING, "levels of all rules together")
    for schema in schemas:
        check_recursion(schema)


class _SchemaCost(NamedTuple):
    """What a JSON schema costs the grammar library."""

    nesting: int = 0
    references: int = 0
    total_nesting: int = 0
    """Sum of the nesting depths of the schema and of all parts that it refers to."""


def _nested_schema(text: str, start: int) -> object:
    """Return the JSON schema at `start` in a Lark grammar; None if it cannot be read."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        # The compiler says what is wrong with it. Its brackets are counted as the grammar's.
        return None
    check_numbers(text[start:end])
    return schema


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        # The compiler says what is wrong with it.
        return
    cost = _schema_cost(schema)
    _require(cost.nesting, MAX_NESTING, "arrays and objects in one another")
    _require(cost.references, MAX_REFERENCES, "references")
    _require(cost.total_nesting, MAX_TOTAL_NESTING, "levels of all references together")
    check_recursion(schema)


def _schema_cost(schema: object) -> _SchemaCost:
    depths: dict[int, int] = {}
    nesting = _nesting(schema, depths)
    references = list(_references(schema))
    total = depths.get(id(schema), 0)
    for name in set(references):
        # A target that is not found is counted as the whole schema.
        total += 1 + depths.get(id(find_target(schema, name)), depths.get(id(schema), 0))
    return _SchemaCost(nesting, len(references), total)


def _nesting(schema: object, depths: dict[int, int]) -> int:
    """Return the nesting levels of a JSON value.

    `depths` receives the levels of each array and object, by `id`.
    """
    stack: list[tuple[object, bool]] = [(schema, False)]
    while stack:
        value, is_done = stack.pop()
        if not isinstance(value, dict | list):
            continue
        parts = list(value.values() if isinstance(value, dict) else value)
        if is_done:
            depths[id(value)] = 1 + max((depths.get(id(part), 0) for part in parts), default=0)
            continue
        stack.append((value, True))
        stack += [(part, False) for part in parts]
    return depths.get(id(schema), 0)


def _references(schema: object) -> Iterator[str]:
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            name = value.get("$ref")
            if isinstance(name, str):
                yield name
            stack += value.values()
        elif isinstance(value, list):
            stack += value
