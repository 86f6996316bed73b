"""Numbers of a schema are kept exactly or refused."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequestError
from outrider.grammar.complexity import check_complexity
from outrider.grammar.json_numbers import MAX_INTEGER, NumberLiteral, check_numbers
from outrider.spec.structured_output import StructuredKind, StructuredOutput

llguidance = pytest.importorskip("llguidance")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"const": 12345678901234567890}', "12345678901234567890 in `const`"),
        ('{"const": 9007199254740993}', "from -9007199254740991 to 9007199254740991"),
        ('{"enum": [18446744073709551615, 1]}', "in `enum`"),
        ('{"const": 1e-30}', "magnitude from 0.000001 to below 1000000000000000"),
        ('{"const": 1e-400}', "in `const`"),
        ('{"const": 1e15}', "in `const`"),
        ('{"const": 0.30000000000000004}', "15 significant digits"),
        ('{"const": {"a": [1, {"b": -9007199254740993}]}}', "in `const`"),
        ('{"enum": [[{"const": 1e30}]]}', "in `enum`"),
        ('{"minimum": 1e30}', "in `minimum`"),
        ('{"items": {"maximum": 9007199254740993}}', "in `maximum`"),
        ('{"anyOf": [{"exclusiveMinimum": 1e-9}]}', "in `exclusiveMinimum`"),
        ('{"properties": {"const": {"exclusiveMaximum": 1e99}}}', "in `exclusiveMaximum`"),
        ('{"$defs": {"a": {"multipleOf": 1e-10}}}', "in `multipleOf`"),
        (f'{{"const": {"1" * 5000}}}', "1111... in `const`"),
        ('{"const": 1e99999999999999999999999}', "in `const`"),
        (f'{{"default": {"1" * 5000}}}', "is too large"),
        ('{"default": 1e400}', "is too large"),
        ('{"const": NaN}', "NaN is no JSON number"),
        ('{"default": -Infinity}', "-Infinity is no JSON number"),
    ],
)
def test_numbers_that_would_be_replaced_are_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured output: ") as caught:
        check_complexity(StructuredOutput(StructuredKind.JSON_SCHEMA, text))
    assert caught.value.reason == "INVALID_STRUCTURE"
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        '{"enum": [0, -0.0, 1.5, 1E5, 0.000001, 123456789012345, -9007199254740991, "1e99"]}',
        '{"minimum": -90.0, "maximum": 90.0, "multipleOf": 0.01}',
        '{"properties": {"minimum": {"default": 1e99}}, "examples": [{"const": 1e99}]}',
        '{"const": "12345678901234567890"}',
        '{"maximum": 9223372036854775807}',
        '{"maximum": 18446744073709551615}',
        '{"const": 1',
        "[" * 100_000,
    ],
)
def test_other_texts_pass(text: str) -> None:
    check_numbers(text)


def spelling(literal: str) -> str:
    """How the library writes the only number that fits."""
    schema = json.loads(f'{{"const": {literal}}}')
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return str(matcher.compute_ff_bytes().decode())


@given(
    st.integers(-MAX_INTEGER, MAX_INTEGER).map(str)
    | st.tuples(st.sampled_from(["", "-"]), st.integers(1, 10**15 - 1), st.integers(-24, 15)).map(
        lambda parts: f"{parts[0]}{parts[1]}e{parts[2]}"
    )
)
def test_the_library_keeps_what_is_allowed(literal: str) -> None:
    if NumberLiteral(literal).is_exact:
        assert Decimal(spelling(literal)) == Decimal(literal)
