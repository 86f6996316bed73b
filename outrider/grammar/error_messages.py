"""Rewords error messages of the grammar library for clients."""

from __future__ import annotations

import re
from typing import Final

_REASONS: Final = {
    "NoExtensionBias": "no text fits it",
    "NoExtension": "no text fits it",
    "LexerTooComplex": "its expressions are too complex",
    "ParserTooComplex": "it is too complex or too ambiguous",
    "MaxTokensParser": "it has no end within the bound on its tokens",
    "InternalError": "the grammar library failed",
}
"""Error messages by the names of the library's stop reasons."""
_ROW: Final = re.compile(r"Current row has \d+ items; max is (\d+)")
"""The library's message about its limit on simultaneous parser states."""
_MARK: Final = "<non-verbose/>"
"""Text at the end of library messages that were cut."""


_NUMBER: Final = r"(?:Some\(([^()]*)\)|None)"
_RANGE: Final = re.compile(
    rf"Failed to generate regex for \w+ range: min={_NUMBER}, max={_NUMBER}.*", re.DOTALL
)
_REWORDED: Final = (
    (
        re.compile(r"Value is not JSON serializable: (\S+)"),
        r"the number \1 is too large: integers must be below 2^64",
    ),
    (
        re.compile(r"regex parse error:.*error: decimal literal invalid", re.DOTALL),
        "a length or a count of repetitions is too large",
    ),
    (re.compile(r"Expected [fui]64 for"), "Expected a number for"),
)
"""Patterns of library messages, and their replacements."""


def plain_error_message(why: str) -> str:
    """Return the library's error message without the library's internal names."""
    why = why.replace(_MARK, "").rstrip()
    if row := _ROW.search(why):
        return (
            f"the grammar has more than {int(row[1]):,} open items at one place of the output: "
            "write rules that repeat themselves as left-recursive ones, or as lists (x*)"
        )
    why = _RANGE.sub(_plain_range, why)
    for pattern, plain in _REWORDED:
        why = pattern.sub(plain, why)
    return _REASONS.get(why, why)


def _plain_range(found: re.Match[str]) -> str:
    """Return the message about bounds of numbers between which the library finds no text."""
    bounds = [
        f"{name} {value}"
        for name, value in zip(("minimum", "maximum"), found.groups(), strict=True)
        if value is not None
    ]
    return f"no number can be written within its bounds ({', '.join(bounds) or 'none'})"
