"""The grammar library's reasons in plain words."""

from __future__ import annotations

from typing import Final

_REASONS: Final = {
    "NoExtensionBias": "no text fits it",
    "NoExtension": "no text fits it",
    "LexerTooComplex": "its expressions are too complex",
    "ParserTooComplex": "it is too complex or too ambiguous",
    "MaxTokensParser": "it has no end within the bound on its tokens",
    "InternalError": "the grammar library failed",
}
"""By the names of the library's stop reasons."""
_MARK: Final = "<non-verbose/>"
"""Stands at the end of the library's messages where they were cut."""


def plain_reason(why: str) -> str:
    """What the library says is wrong, without names of its own."""
    why = why.replace(_MARK, "").rstrip()
    return _REASONS.get(why, why)
