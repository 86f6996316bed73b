"""The grammar library's names for its reasons reach no client."""

from __future__ import annotations

import pytest

from outrider.grammar.error_messages import plain_error_message


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("NoExtensionBias\n<non-verbose/>", "no text fits it"),
        ("ParserTooComplex", "it is too complex or too ambiguous"),
        (
            "Parser Error: Current row has 2001 items; max is 2000; consider making your grammar "
            "left-recursive if it's right-recursive\n<non-verbose/>",
            "the grammar has more than 2,000 open items at one place of the output: write rules "
            "that repeat themselves as left-recursive ones, or as lists (x*)",
        ),
        ("Invalid type: nothing", "Invalid type: nothing"),
        (
            "Failed to generate regex for float range: min=Some(1e30), max=Some(2e30)",
            "no number can be written within its bounds (minimum 1e30, maximum 2e30)",
        ),
        (
            "Failed to generate regex for integer range: min=None, max=Some(-7)\n<non-verbose/>",
            "no number can be written within its bounds (maximum -7)",
        ),
        (
            "Value is not JSON serializable: 1" + "0" * 60,
            "the number 1" + "0" * 60 + " is too large: integers must be below 2^64",
        ),
        (
            "regex parse error:\n    (?s:.{0,9})\n        ^\nerror: decimal literal invalid",
            "a length or a count of repetitions is too large",
        ),
        ("Expected f64 for 'minimum', got \"a\"", "Expected a number for 'minimum', got \"a\""),
        ("unknown name: x\n<non-verbose/>", "unknown name: x"),
    ],
)
def test_reasons_are_told_in_plain_words(why: str, told: str) -> None:
    assert plain_error_message(why) == told
