"""A grammar over a dozen ids, written down: what may follow what."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import mask_of

WORDS, END = 2, 9
LANGUAGE: dict[tuple[int, ...], list[int]] = {
    (): [1, 2],
    (1,): [3],
    (1, 3): [4],
    (1, 3, 4): [5, 6],
    (1, 3, 4, 5): [7, 8],
    (2,): [5, 6],
    (2, 5): [5, 6],
    (2, 6): [END],
    (2, 5, 5): [5, 6],
}
"""What may follow what; nothing follows END."""


class Scripted:
    """A constraint (`outrider.grammar.constraint`) over LANGUAGE; elsewhere 5 and 6 may follow."""

    failed, words, matcher = "", WORDS, None

    def __init__(self) -> None:
        self.path: list[int] = []

    def follow(self, output_ids: NDArray[np.int32]) -> None:
        assert not self.path

    def finish(self, mask: NDArray[np.uint32]) -> None:
        mask[:] = mask_of(LANGUAGE.get(tuple(self.path), [5, 6]), WORDS)

    def enter(self, token: int) -> bool:
        assert token in LANGUAGE.get(tuple(self.path), [5, 6])
        if token == END:
            return False
        self.path.append(token)
        return True

    def leave(self, count: int) -> None:
        assert count <= len(self.path)
        del self.path[len(self.path) - count :]
