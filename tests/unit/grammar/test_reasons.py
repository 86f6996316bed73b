"""The grammar library's names for its reasons reach no client."""

from __future__ import annotations

import pytest

from outrider.grammar.reasons import plain_reason


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("NoExtensionBias\n<non-verbose/>", "no text fits it"),
        ("ParserTooComplex", "it is too complex or too ambiguous"),
        ("Invalid type: nothing", "Invalid type: nothing"),
        ("unknown name: x\n<non-verbose/>", "unknown name: x"),
    ],
)
def test_reasons_are_told_in_plain_words(why: str, told: str) -> None:
    assert plain_reason(why) == told
