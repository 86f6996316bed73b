"""A grammar over a dozen ids, written down: what may follow what."""

from __future__ import annotations

from collections.abc import Sequence

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

    failed, words, vocab_size, matcher, here, meter = "", WORDS, 32 * WORDS, None, None, None

    def __init__(self) -> None:
        self.path: list[int] = []
        """What stands and what was entered."""
        self.stood = 0

    def follow(self, output_ids: NDArray[np.int32]) -> None:
        assert len(self.path) == self.stood

    def stand(self) -> None:
        self.stood = len(self.path)

    def prepare(self, output_ids: NDArray[np.int32]) -> bool:
        return True

    def give_up(self, why: str) -> None:
        raise AssertionError(why)

    def finish(self, masks: NDArray[np.uint32], tokens: Sequence[int]) -> int:
        for depth, mask in enumerate(masks):
            legal = self._legal(*tokens[:depth])
            mask[:] = mask_of(legal, WORDS)
            if depth == len(tokens) or tokens[depth] not in legal or tokens[depth] == END:
                return depth
        raise AssertionError("a mask more than tokens")

    def enter(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token == END or token not in self._legal():
                return count
            self.path.append(token)
        return len(tokens)

    def leave(self, count: int) -> None:
        assert count <= len(self.path) - self.stood
        del self.path[len(self.path) - count :]

    def forced(self) -> Sequence[int]:
        found: list[int] = []
        while len(legal := self._legal(*found)) == 1 and legal[0] != END:
            found += legal
        return found

    def _legal(self, *tokens: int) -> list[int]:
        return LANGUAGE.get((*self.path, *tokens), [5, 6])
