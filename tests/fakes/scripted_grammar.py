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

    failure, num_mask_words, vocab_size, matcher, current_mask, meter = (
        "",
        WORDS,
        32 * WORDS,
        None,
        None,
        None,
    )

    def __init__(self) -> None:
        self.path: list[int] = []
        """What stands and what was entered."""
        self.stood = 0

    def advance_to(self, output_ids: NDArray[np.int32]) -> None:
        assert len(self.path) == self.stood

    def commit_tokens(self) -> None:
        self.stood = len(self.path)

    def prepare(self, output_ids: NDArray[np.int32]) -> bool:
        return True

    def give_up(self, why: str) -> None:
        raise AssertionError(why)

    def fill_masks(self, masks: NDArray[np.uint32], tokens: Sequence[int]) -> int:
        for depth, mask in enumerate(masks):
            allowed_tokens = self._allowed_tokens(*tokens[:depth])
            mask[:] = mask_of(allowed_tokens, WORDS)
            if depth == len(tokens) or tokens[depth] not in allowed_tokens or tokens[depth] == END:
                return depth
        raise AssertionError("a mask more than tokens")

    def push_tokens(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token == END or token not in self._allowed_tokens():
                return count
            self.path.append(token)
        return len(tokens)

    def pop_tokens(self, count: int) -> None:
        assert count <= len(self.path) - self.stood
        del self.path[len(self.path) - count :]

    def forced_tokens(self) -> Sequence[int]:
        found: list[int] = []
        while len(allowed_tokens := self._allowed_tokens(*found)) == 1 and allowed_tokens[0] != END:
            found += allowed_tokens
        return found

    def _allowed_tokens(self, *tokens: int) -> list[int]:
        return LANGUAGE.get((*self.path, *tokens), [5, 6])
