"""Structured-output constraint of a request: kind and text of its grammar (torch-free).

No grammar library is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from outrider.errors import InvalidRequestError

MAX_STRUCTURE_BYTES = 1 << 18
"""Maximum size of a schema, expression or grammar, in bytes of UTF-8."""


class StructuredKind(StrEnum):
    """Language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON; the answer is a JSON value that fits it."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the `text` is empty."""
    REGEX = "regex"
    """A regular expression that the whole answer matches."""
    GRAMMAR = "grammar"
    """A context-free grammar in Lark's syntax, as llguidance reads it."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Grammar that an answer must follow, as its source text. Requests with equal values share one
    compiled grammar.

    The constructor raises InvalidRequestError if the text is missing, too long, or given for a kind
    that has none. It does not check that the text is a valid schema, expression or grammar.
    """

    kind: StructuredKind
    text: str = ""
    """The schema, expression or grammar; empty for JSON_OBJECT."""

    def __post_init__(self) -> None:
        wanted = self.kind is not StructuredKind.JSON_OBJECT
        if wanted != bool(self.text):
            need = "needs a text" if wanted else "takes no text"
            raise InvalidRequestError(
                f"structured output of kind {self.kind} {need}",
                reason="INVALID_STRUCTURE",
                param="structured_outputs",
            )
        size = len(self.text.encode(errors="surrogatepass"))
        if size > MAX_STRUCTURE_BYTES:
            raise InvalidRequestError(
                f"structured output must be at most {MAX_STRUCTURE_BYTES} bytes, got {size}",
                reason="INVALID_STRUCTURE",
                param="structured_outputs",
            )


def lark_literal(text: str) -> str:
    """Return a string literal in Lark's syntax: a JSON string in which DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
