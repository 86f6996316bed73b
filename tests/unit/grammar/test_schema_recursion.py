"""References that lead only to themselves are refused, and other recursion is not."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest

from outrider.errors import InvalidRequestError
from outrider.grammar.complexity import check_complexity
from outrider.grammar.schema_recursion import check_recursion, find_target
from outrider.spec.structured_output import StructuredKind, StructuredOutput

X = {"$ref": "#/$defs/x"}


def using(definition: Any, **defs: Any) -> dict[str, Any]:
    """Return a schema with an optional member of this definition."""
    return {"type": "object", "properties": {"a": X}, "$defs": {"x": definition, **defs}}


ENDLESS = [
    using(X),
    using({"$ref": "#/$defs/y"}, y=X),
    using({"anyOf": [X]}),
    using({"oneOf": [X, X]}),
    using({"allOf": [{"type": "object"}, X]}),
    using({"$ref": "#/properties/a"}),
    {"type": "object", "properties": {"a": {"type": "array", "items": X}}, "$defs": {"x": X}},
    {"$ref": "#"},
]
FINITE = [
    using({"type": "integer"}),
    using({"anyOf": [X, {"type": "integer"}]}),
    using({"anyOf": [X, True]}),
    using({"type": "object", "properties": {"next": X}}),
    using({"type": "object", "properties": {"next": X}, "required": ["next"]}),
    using({"type": "array", "items": X, "minItems": 1}),
    using({"type": "array", "items": X}),
    using({"type": "array", "prefixItems": [True, X], "minItems": 2}),
    using({"anyOf": [{"$ref": "#/$defs/y"}, {"type": "null"}]}, y={"allOf": [X]}),
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    # No part of the schema, but a value.
    using({"const": X, "enum": [X]}),
    # Unused, unknown and external.
    {"type": "object", "$defs": {"x": X}},
    using({"$ref": "#/$defs/none"}),
    using({"$ref": "https://example.com/schema"}),
    # Malformed: the grammar library says so.
    using({"anyOf": []}),
    using({"required": 5, "type": "object", "properties": []}),
    True,
    None,
]


@pytest.mark.parametrize("schema", ENDLESS, ids=json.dumps)
def test_a_reference_only_to_itself_is_refused(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    for structured in (
        StructuredOutput(StructuredKind.JSON_SCHEMA, text),
        StructuredOutput(StructuredKind.GRAMMAR, f"start: %json {text}"),
    ):
        with pytest.raises(InvalidRequestError, match="leads only to itself") as refused:
            check_complexity(structured)
        assert (refused.value.reason, refused.value.param) == (
            "INVALID_STRUCTURE",
            "structured_outputs",
        )


@pytest.mark.parametrize("schema", FINITE, ids=json.dumps)
def test_other_schemas_pass(schema: object) -> None:
    check_recursion(schema)


def test_the_time_is_proportional_to_the_size() -> None:
    names = [f"d{n}" for n in range(20_000)]
    chain = {name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(names)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, names[-1]: {"type": "null"}}}
    begun = time.monotonic()
    check_recursion(schema)
    assert time.monotonic() - begun < 2


def test_targets_of_references_are_found() -> None:
    schema = {"$defs": {"a/b~": [5, {"": 6}]}}
    assert find_target(schema, "#") is schema
    assert find_target(schema, "#/$defs/a~1b~0/0") == 5
    assert find_target(schema, "#/$defs/a~1b~0/1/") == 6
    for unknown in ("#/x", "#x", "", "http://x/$defs", "#/$defs/a~1b~0/7", "#/$defs/b"):
        assert find_target(schema, unknown) is None
    assert find_target(schema, "#/$defs/a~1b~0/" + "9" * 5000) is None
