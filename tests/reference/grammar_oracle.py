"""Slow, obvious masks, without a grammar library: the texts of a finite language one by one.

An id is allowed where some text of the language goes on with its bytes; an end where what there is
is a whole text. Where all texts go on with the same bytes the library allows the one id only with
which the tokenizer itself would write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.text.tokenizer import Tokenizer


class FiniteLanguage:
    """Some texts, in the ids of a tokenizer."""

    def __init__(self, texts: Sequence[str], model: Path, vocab_size: int) -> None:
        tokenizer = Tokenizer.load(model)
        self._texts = [text.encode() for text in texts]
        self._pieces = [tokenizer.pieces[i] for i in range(tokenizer.num_ids)]
        self._vocab_size = vocab_size

    def legal(self, ids: Sequence[int], stop_ids: Sequence[int]) -> set[int]:
        """What may follow `ids`; everything where these are not legal themselves."""
        said = b""
        for token in ids:
            piece = self._pieces[token] if token < len(self._pieces) else b""
            said += piece
            if not piece or not any(text.startswith(said) for text in self._texts):
                return set(range(self._vocab_size))
        found = {
            token
            for token, piece in enumerate(self._pieces)
            if piece and any(text.startswith(said + piece) for text in self._texts)
        }
        return found | set(stop_ids) if said in self._texts else found

    def agrees(self, found: set[int], ids: Sequence[int], stop_ids: Sequence[int]) -> bool:
        """Whether this is what is allowed behind `ids`, or the one way on where there is one
        text."""
        expected = self.legal(ids, stop_ids)
        if found == expected:
            return True
        said = b"".join(self._pieces[token] for token in ids)
        left = [text for text in self._texts if text.startswith(said)]
        (only,) = found if len(found) == 1 else (-1,)
        forced = only >= 0 and all(text.startswith(said + self._pieces[only]) for text in left)
        return forced and found < expected


def ids_of(mask: NDArray[np.uint32], vocab_size: int) -> set[int]:
    """The ids of a mask that are below the vocabulary's size."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:vocab_size]).tolist())
