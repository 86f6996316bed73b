"""All ways to ask for a form mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider_router.api.http.structured_outputs import StructuredOutputFields, structured_output_of
from pydantic import ValidationError

from outrider.errors import InvalidRequestError
from outrider.grammar.constraint import allowed_mask, is_allowed
from outrider.grammar.grammar_cache import GrammarCache
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import EOS_ID, make_tokenizer_dir
from tests.mask_limits import LONG_MASKS

SCHEMA = {"type": "object"}
AS_TEXT = json.dumps(SCHEMA)


def asked(**fields: Any) -> StructuredOutput | None:
    return structured_output_of(StructuredOutputFields.model_validate(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        {"guided_json": SCHEMA},
        {"guided_json": AS_TEXT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": AS_TEXT}},
    ],
)
def test_a_schema_may_be_said_in_many_ways(fields: dict[str, Any]) -> None:
    assert asked(**fields) == StructuredOutput(StructuredKind.JSON_SCHEMA, AS_TEXT)


def test_any_object_a_regex_and_a_grammar() -> None:
    anything = StructuredOutput(StructuredKind.JSON_OBJECT)
    assert asked(response_format={"type": "json_object"}) == anything
    assert asked(structured_outputs={"json_object": True}) == anything
    regex = StructuredOutput(StructuredKind.REGEX, "a+")
    assert asked(guided_regex="a+") == asked(structured_outputs={"regex": "a+"}) == regex
    grammar = StructuredOutput(StructuredKind.GRAMMAR, "start: WORD")
    assert asked(guided_grammar="start: WORD") == grammar
    assert asked(structured_outputs={"grammar": "start: WORD"}) == grammar


def test_choices_are_a_grammar_of_their_texts() -> None:
    assert asked(guided_choice=['a "b"', "c\\\n|\u00e9"]) == StructuredOutput(
        StructuredKind.GRAMMAR, 'start: "a \\"b\\"" | "c\\\\\\n|\u00e9"'
    )


def test_every_character_may_be_in_a_choice(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_dir(tmp_path))
    odd = "".join(map(chr, [*range(0x100), 0x2028, 0x2029, 0xFEFF, 0xFFFF, 0x1F600]))
    form = asked(guided_choice=[odd])
    assert form is not None and tokenizer.file is not None
    grammars = GrammarCache(
        tokenizer.file.read_text(), vocab_size=tokenizer.num_ids, masks=LONG_MASKS
    )
    constraint = grammars.compile_grammar(form).start_constraint([EOS_ID])
    ids = np.array(tokenizer.encode(odd), dtype=np.int32)
    constraint.advance_to(ids)
    assert not constraint.failure
    assert is_allowed(allowed_mask(constraint), EOS_ID), "the whole text was taken, to the letter"


def test_text_is_no_form() -> None:
    assert asked() is asked(response_format={"type": "text"}) is asked(guided_json=None) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json_object": True, "regex": "a"}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    ],
)
def test_an_answer_has_one_form_and_a_whole_one(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        asked(**fields)
    assert raised.value.reason == "INVALID_STRUCTURE"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice and guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex and response_format",
        ),
        (
            {"structured_outputs": {"json_object": True, "regex": "a"}, "guided_json": SCHEMA},
            "guided_json, structured_outputs.json_object and structured_outputs.regex",
        ),
    ],
)
def test_forms_that_exclude_each_other_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        asked(**fields)
    assert raised.value.message == f"{said} exclude each other: give one of them"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": "json"},
        {"guided_regex": ""},
        {"guided_choice": []},
        {"guided_choice": [1]},
        {"guided_json": 3},
    ],
)
def test_what_is_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        asked(**fields)
