"""Structured-output fields of HTTP requests, in the formats of OpenAI and vLLM.

Pure. Schemas, expressions and grammars are validated later, when they are compiled.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from outrider.errors import InvalidRequestError
from outrider.spec.structured_output import (
    MAX_STRUCTURE_BYTES,
    StructuredKind,
    StructuredOutput,
    lark_literal,
)
from outrider_router.api.http.unsupported_fields import STRUCTURE, refuse_unsupported
from outrider_router.api.http.validation_errors import UNION_TAG

NonEmptyText = Annotated[str, Len(1, MAX_STRUCTURE_BYTES)]


def _schema_kind(value: object) -> str:
    return f"{UNION_TAG}text" if isinstance(value, str) else f"{UNION_TAG}object"


Schema = Annotated[
    Annotated[dict[str, Any], Tag(f"{UNION_TAG}object")]
    | Annotated[NonEmptyText, Tag(f"{UNION_TAG}text")],
    Discriminator(_schema_kind),
]
"""JSON Schema, as an object or as its text."""
Choices = Annotated[list[NonEmptyText], Field(min_length=1, max_length=1024, fail_fast=True)]


class StrictModel(BaseModel):
    """Base class of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class JsonSchema(StrictModel):
    """JSON Schema with a name, in OpenAI's format."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="It is always kept to the letter.")


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`; exactly one field may be set."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: NonEmptyText | None = None
    choice: Choices | None = None
    grammar: NonEmptyText | None = Field(default=None, description="A grammar in Lark's syntax.")


class StructuredOutputFields(StrictModel):
    """Fields of a request that ask for a structured output; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(
        default=None, description="Same as `structured_outputs.json`."
    )
    guided_regex: NonEmptyText | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmptyText | None = None


def structured_output_of(body: StructuredOutputFields) -> StructuredOutput | None:
    """Return the structured output of a request, or None. Raises InvalidRequestError if it is
    incomplete or if there are several.
    """
    said = _of(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )
    if (wanted := _of_format(body.response_format)) is not None:
        said["response_format"] = wanted
    nested = body.structured_outputs
    if nested is not None:
        refuse_unsupported(nested.model_extra, STRUCTURE, "structured_outputs.")
        where = "structured_outputs."
        parts = _of(where, nested.json_, nested.regex, nested.choice, nested.grammar)
        if nested.json_object:
            parts[f"{where}json_object"] = StructuredOutput(StructuredKind.JSON_OBJECT)
        if not parts:
            raise _invalid("structured_outputs must hold json, json_object, regex, choice, grammar")
        said |= parts
    if len(said) > 1:
        *others, last = sorted(said)
        raise _invalid(f"{', '.join(others)} and {last} exclude each other: give one of them")
    return next(iter(said.values()), None)


def _of_format(wanted: ResponseFormat | None) -> StructuredOutput | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutput(StructuredKind.JSON_OBJECT)
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    if schema is None:
        raise _invalid("response_format of type json_schema needs json_schema.schema")
    return StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(schema))


def _of(
    where: str,
    schema: Schema | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> dict[str, StructuredOutput]:
    """Return the structured outputs that are set, by the names of their fields. `where` is the
    prefix of these names.
    """
    found = {}
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found[f"{where}json"] = StructuredOutput(StructuredKind.JSON_SCHEMA, text)
    if regex is not None:
        found[f"{where}regex"] = StructuredOutput(StructuredKind.REGEX, regex)
    if choice is not None:
        alternatives = " | ".join(map(lark_literal, choice))
        text = f"start: {alternatives}"
        found[f"{where}choice"] = StructuredOutput(StructuredKind.GRAMMAR, text)
    if grammar is not None:
        found[f"{where}grammar"] = StructuredOutput(StructuredKind.GRAMMAR, grammar)
    return found


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_STRUCTURE", param="structured_outputs")


def structure_field(body: StructuredOutputFields) -> str:
    """Return the name of the first structured-output field that is set in a body."""
    return next(
        (name for name in StructuredOutputFields.model_fields if getattr(body, name) is not None),
        "structured_outputs",
    )
