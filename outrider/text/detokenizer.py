"""Incremental detokenizer: converts token ids to text, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from outrider.text.token_bytes import TokenByteTable


class Detokenizer:
    """Converts a stream of token ids to pieces of text. Together, the pieces equal the text of all
    ids.

    A character split across tokens is held back until it is complete. Only bytes that can no longer
    become a character are shown as U+FFFD.
    """

    def __init__(self, pieces: TokenByteTable) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._to_strip = pieces.strip_start

    def push_tokens(self, token_ids: Iterable[int]) -> str:
        """Add token ids, and return the text that they complete. It is empty while a character is
        incomplete."""
        text = self._utf8.decode(b"".join(map(self._pieces.__getitem__, token_ids)))
        return self._strip(text) if self._to_strip else text

    def flush(self) -> str:
        """Return the remaining text at the end of the stream: U+FFFD for an incomplete character,
        else an empty text."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text
