"""Forms that an answer may be asked to have, for the option `structured_output`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.spec.structured import StructuredKind, StructuredOutput


def json_schema(schema: Mapping[str, Any] | str) -> StructuredOutput:
    """A JSON value that fits a schema, given as JSON or as what JSON is made of.

    Raises InvalidRequestError for what cannot be JSON.
    """
    if isinstance(schema, str):
        return StructuredOutput(StructuredKind.JSON_SCHEMA, schema)
    try:
        # In the order given, which is the order of the answer's properties.
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}") from error
    return StructuredOutput(StructuredKind.JSON_SCHEMA, text)


def json_object() -> StructuredOutput:
    """Any JSON object."""
    return StructuredOutput(StructuredKind.JSON_OBJECT)


def regex(expression: str) -> StructuredOutput:
    """Text that a regular expression matches as a whole."""
    return StructuredOutput(StructuredKind.REGEX, expression)


def grammar(lark: str) -> StructuredOutput:
    """Text of a context-free grammar, which is written in Lark's syntax."""
    return StructuredOutput(StructuredKind.GRAMMAR, lark)
