"""Numbers in JSON answers come to an end, wherever the grammar lets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.grammar import digit_bound
from outrider.grammar.constraint import allowed_mask, is_allowed, masks_along_drafts
from outrider.grammar.digit_bound import MAX_NUMBER_DIGITS, JsonPosition, ReasoningTags
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.grammar.tool_calls import (
    ThinkTags,
    ToolSchema,
    tool_call_grammar,
    wrap_structured_output,
)
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.fakes.tokenizer import EOS_ID, make_tokenizer_dir
from tests.mask_limits import LONG_MASKS

DIGITS = "0123456789"


class Byte:
    """Ids of single characters in the tests' tokenizer."""

    def __init__(self, directory: Path) -> None:
        vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
        self.id = {text: token for text, token in vocabulary.items() if len(text) == 1}

    def of(self, text: str) -> list[int]:
        return [self.id[character] for character in text.replace(" ", "\u0120")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_dir(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte(directory: Path) -> Byte:
    return Byte(directory)


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Iterator[GrammarCache]:
    found = GrammarCache.from_tokenizer_file(
        directory / "tokenizer.json", vocab_size=320, masks=LONG_MASKS
    )
    assert found is not None
    yield found
    found.close()


def begun(grammars: GrammarCache, schema: object) -> GrammarConstraint:
    form = StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(schema))
    return grammars.compile_grammar(form).start_constraint([EOS_ID])


def digits_allowed(constraint: GrammarConstraint, byte: Byte) -> bool:
    mask = allowed_mask(constraint)
    return any(is_allowed(mask, token) for token in byte.of(DIGITS))


@pytest.mark.parametrize(
    ("schema", "before"),
    [
        ({"type": "integer"}, ""),
        ({"type": "number"}, "-"),
        ({"type": "number", "minimum": 0.5, "maximum": 0.75}, "0."),
        ({}, '["1", '),
    ],
)
def test_a_number_ends_after_so_many_digits(
    grammars: GrammarCache, byte: Byte, schema: object, before: str
) -> None:
    constraint = begun(grammars, schema)
    tokens = byte.of(before + "6" * (MAX_NUMBER_DIGITS - 1))
    constraint.advance_to(np.array(tokens, dtype=np.int32))
    assert not constraint.failure and digits_allowed(constraint, byte)
    # Along drafts, in steps and for good the bound is the same.
    six = byte.of("6")[0]
    along = masks_along_drafts([(constraint, [six, six, six])])[0]
    assert along.entered == 1
    assert constraint.push_tokens([six]) == 1 and not digits_allowed(constraint, byte)
    stepped = allowed_mask(constraint).copy()
    constraint.pop_tokens(1)
    assert digits_allowed(constraint, byte)
    constraint.advance_to(np.array([*tokens, six], dtype=np.int32))
    assert not constraint.failure and allowed_mask(constraint).any()
    for mask in (along.masks[1], stepped):
        assert np.array_equal(mask, allowed_mask(constraint))


@pytest.mark.parametrize("before", ["1e", "-1.5E+", "[true, 2e-", '{"e": 1e5, "f": 3e'])
def test_an_exponent_ends_after_three_digits(
    grammars: GrammarCache, byte: Byte, before: str
) -> None:
    constraint = begun(grammars, {})
    tokens = byte.of(before)
    six = byte.of("6")[0]
    for _ in range(3):
        constraint.advance_to(np.array(tokens, dtype=np.int32))
        assert not constraint.failure and digits_allowed(constraint, byte)
        tokens.append(six)
    assert constraint.push_tokens([six]) == 1 and not digits_allowed(constraint, byte)


class Tokenizer:
    """Texts of tokens, each with some digits."""

    texts = (b"1", b"12", b"123", b"1,", b",", b"0", b"000", b"001")
    vocab_size = len(texts)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return self.texts[tokens[0]]


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("1e", Tokenizer.texts),
        ("1e4", (b"1", b"12", b"1,", b",", b"0")),
        ("1e+45", (b"1", b"1,", b",", b"0")),
        ("1e456", (b",",)),
        ("4" * 32, (b",",)),
        ('"1e456', Tokenizer.texts),
    ],
)
def test_tokens_of_several_digits_keep_the_bound(text: str, allowed: tuple[bytes, ...]) -> None:
    bound = digit_bound.DigitBound(cast(Any, Tokenizer()), 1)
    mask = np.array([(1 << Tokenizer.vocab_size) - 1], dtype=np.uint32)
    bound.restrict(mask, JsonPosition().advance(text.encode()))
    kept = [text for token, text in enumerate(Tokenizer.texts) if is_allowed(mask, token)]
    assert kept == list(allowed)


@pytest.mark.parametrize(
    ("schema", "before"),
    [
        ({"type": "number", "exclusiveMinimum": 1}, "1."),
        ({"type": "number", "exclusiveMaximum": -1}, "-1."),
        ({"type": "number", "exclusiveMinimum": 0.5}, "0.5"),
    ],
)
def test_a_number_beyond_an_exclusive_bound_ends_after_a_digit_that_is_not_zero(
    grammars: GrammarCache, byte: Byte, schema: object, before: str
) -> None:
    constraint = begun(grammars, schema)
    tokens = byte.of(before)
    zero, one = byte.of("01")
    constraint.advance_to(np.array(tokens, dtype=np.int32))
    while is_allowed(allowed_mask(constraint), zero):
        tokens.append(zero)
        constraint.advance_to(np.array(tokens, dtype=np.int32))
        assert len(tokens) <= len(before) + MAX_NUMBER_DIGITS
    assert is_allowed(allowed_mask(constraint), one) and not is_allowed(
        allowed_mask(constraint), EOS_ID
    )
    constraint.advance_to(np.array([*tokens, one], dtype=np.int32))
    assert not constraint.failure and is_allowed(allowed_mask(constraint), EOS_ID)
    assert not digits_allowed(constraint, byte)


def test_digits_that_the_schema_asks_for_are_not_bounded(
    grammars: GrammarCache, byte: Byte, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digit_bound, "MAX_NUMBER_DIGITS", 3)
    number = 77_777_777
    constraint = begun(grammars, {"const": number})
    constraint.advance_to(np.array(byte.of(str(number)), dtype=np.int32))
    assert not constraint.failure and is_allowed(allowed_mask(constraint), EOS_ID)
    text = begun(grammars, {"type": "string"})
    text.advance_to(np.array(byte.of('"' + "7" * 2 * MAX_NUMBER_DIGITS), dtype=np.int32))
    assert not text.failure and digits_allowed(text, byte), "a string is no number"


CALL = '{"name": "f9", "parameters": {"a":"x","n":'
THINK = ThinkTags(open_tag="<think>", close_tag="</think>", is_open=False)


@pytest.mark.parametrize("begin", ["", "<think>", f'<think>say "{"7" * 40} now</think>'])
@pytest.mark.parametrize("is_open", [False, True])
def test_numbers_in_enforced_calls_end_and_those_in_reasoning_need_not(
    grammars: GrammarCache, byte: Byte, begin: str, is_open: bool
) -> None:
    """A quote in the reasoning does not make the numbers of the call strings."""
    think = replace(THINK, is_open=is_open)
    numbers = {"a": {"type": "string"}, "n": {"type": "number"}}
    tool = ToolSchema(
        name="f9",
        parameters=json.dumps({"type": "object", "properties": numbers, "required": ["a", "n"]}),
    )
    grammar = tool_call_grammar("llama3_json", [tool], parallel=False, special_ids={}, think=think)
    constraint = grammars.compile_grammar(
        StructuredOutput(StructuredKind.GRAMMAR, grammar)
    ).start_constraint([EOS_ID])
    begin = begin.removeprefix("<think>") if is_open else begin
    if begin == "<think>" or (is_open and not begin):
        text = begin + "7" * 2 * MAX_NUMBER_DIGITS
        constraint.advance_to(np.array(byte.of(text), dtype=np.int32))
        assert not constraint.failure and digits_allowed(constraint, byte)
        begin = text + "</think>"
    for end in ("", ".", "e"):
        # Fewer digits in an exponent.
        digits = "6" * (3 if end == "e" else MAX_NUMBER_DIGITS)
        before = "6" + end if end else ""
        text = begin + CALL
        fresh = grammars.compile_grammar(
            StructuredOutput(StructuredKind.GRAMMAR, grammar)
        ).start_constraint([EOS_ID])
        fresh.advance_to(np.array(byte.of(text + before + digits[:-1]), dtype=np.int32))
        assert not fresh.failure and digits_allowed(fresh, byte), fresh.failure
        assert fresh.push_tokens(byte.of("6")) == 1 and not digits_allowed(fresh, byte)


def test_numbers_in_structured_output_behind_reasoning_end(
    grammars: GrammarCache, byte: Byte
) -> None:
    number = StructuredOutput(StructuredKind.JSON_SCHEMA, '{"type": "integer"}')
    wrapped = wrap_structured_output(number, special_ids={}, think=THINK)
    for begin in ("", "<think>a </think>"):
        constraint = grammars.compile_grammar(wrapped).start_constraint([EOS_ID])
        digits = begin + "6" * MAX_NUMBER_DIGITS
        constraint.advance_to(np.array(byte.of(digits), dtype=np.int32))
        assert not constraint.failure and not digits_allowed(constraint, byte)


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "{",
        "[[], [], false]",
        '[[1000000], ["a"], false]',
        '[["a"], ["b"]]',
        '[[""], ["b"], true]',
        json.dumps([["a" * 1000], ["b"], True]),
        "[" * 10_000,
    ],
)
def test_a_clients_line_that_is_no_valid_one_is_one_without_reasoning(
    grammars: GrammarCache, byte: Byte, line: str
) -> None:
    text = f"// json_numbers {line}\nstart: /[0-9]+x/"
    grammar = StructuredOutput(StructuredKind.GRAMMAR, text)
    constraint = grammars.compile_grammar(grammar).start_constraint([EOS_ID])
    constraint.advance_to(np.array(byte.of("6" * MAX_NUMBER_DIGITS), dtype=np.int32))
    assert not constraint.failure and not digits_allowed(constraint, byte)


@given(
    pieces=st.lists(st.sampled_from(["<t>", "</t>", "<", "t>", '"', "12", "e5", " "]), max_size=12),
    is_open=st.booleans(),
    cut=st.integers(0, 40),
)
def test_pieces_of_text_with_reasoning_lead_where_the_whole_does(
    pieces: list[str], is_open: bool, cut: int
) -> None:
    text = "".join(pieces).encode()
    start = JsonPosition(reasoning=ReasoningTags(b"<t>", b"</t>", is_open))
    whole = start.advance(text)
    assert start.advance(text[:cut]).advance(text[cut:]) == whole
    if (is_open or text.startswith(b"<t>")) and b"</t>" in text:
        assert whole == JsonPosition().advance(text.partition(b"</t>")[2])


@given(
    value=st.recursive(
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    ),
    cut=st.integers(0, 40),
)
def test_pieces_of_text_lead_where_the_whole_does(value: object, cut: int) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    whole = JsonPosition().advance(text)
    assert JsonPosition().advance(text[:cut]).advance(text[cut:]) == whole
    assert not whole.in_string and not whole.escaped
