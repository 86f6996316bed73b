"""Table of the bytes that each token id contributes to the text.

The decoders of the served model families (byte-level BPE; SentencePiece with byte fallback) are
concatenations of per-token bytes, apart from a space stripped at the very start. Working on bytes
makes incremental detokenizing exact: the pieces of a stream together equal the text of all its ids.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from outrider.errors import FailedPreconditionError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the printable substitutes of byte-level BPE: printable Latin-1 stands for itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


class TokenByteTable:
    """Table of the bytes that each token id contributes to a text. An entry is computed when it is
    first read. Special and unknown ids contribute nothing."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        byte_level: bool,
        byte_fallback: bool,
        replacements: tuple[tuple[str, str], ...],
        strip_start: int,
    ) -> None:
        self._fast = fast
        self._byte_level = byte_level
        self._byte_fallback = byte_fallback
        self._replacements = replacements
        self.strip_start = strip_start
        """Number of spaces that are removed from the start of a whole text."""
        added = fast.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._cache: dict[int, bytes] = {}

    def including_special(self, ids: Collection[int] | None = None) -> TokenByteTable:
        """Return the same table, in which these special ids (None: all) contribute their text,
        too."""
        table = copy.copy(self)
        table._special = frozenset() if ids is None else self._special - frozenset(ids)
        table._cache = {}
        return table

    @classmethod
    def from_tokenizer(cls, fast: FastTokenizer) -> TokenByteTable:
        """Create the table of a tokenizer. Raises FailedPreconditionError if the tokenizer's
        decoder is not supported."""
        if fast.decoder is None:
            raise _unsupported("none")
        spec = json.loads(fast.decoder.__getstate__())
        parts: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        strip_start = 0
        for part in parts:
            match part:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                    strip_start = start
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                    replacements.append((mark, " "))
                    strip_start = 0 if scheme == "never" else 1
                case _:
                    raise _unsupported(str(part.get("type")))
        return cls(
            fast,
            byte_level=byte_level,
            byte_fallback=byte_fallback,
            replacements=tuple(replacements),
            strip_start=strip_start,
        )

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of one id."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            if all(char in _BYTE_LEVEL for char in token):
                return bytes(_BYTE_LEVEL[char] for char in token)
            return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _unsupported(kind: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the tokenizer's decoder ({kind}) cannot be streamed; byte-level BPE and SentencePiece "
        "with byte fallback can",
        reason="UNSUPPORTED_DECODER",
    )
