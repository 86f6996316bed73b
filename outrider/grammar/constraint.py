"""Which ids may follow where a session is, and at every node of a draft.

A mask is a bit set over target ids: uint32 [W], W = ceil(V / 32), id i is bit i % 32 of word
i // 32. N nodes of a tree, P paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)


def mask_words(vocab_size: int) -> int:
    """W: words of a mask."""
    return -(-vocab_size // 32)


def mask_of(ids: Sequence[int] | NDArray[np.int64], words: int) -> Mask:
    """The mask of these ids, uint32 [words]; it must have a bit for each."""
    found = np.zeros(32 * words, dtype=np.bool_)
    found[np.asarray(ids, dtype=np.int64)] = True
    return np.packbits(found, bitorder="little").view("<u4").astype(np.uint32)


def allows(mask: Mask, token: int) -> bool:
    """Whether an id that the mask has a bit for is in it."""
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def only_id(mask: Mask) -> int | None:
    """The one id that a mask has; None if it has more, or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1


class Constraint(Protocol):
    """What one session may emit, wherever it is. Of one thread at a time.

    What stands is never taken back; drafts are tried and undone.
    """

    @property
    def failed(self) -> str:
        """Why the session cannot go on; empty while it can."""
        ...

    def follow(self, output_ids: NDArray[np.int32]) -> None:
        """Move on to what stands behind `output_ids`, all that was emitted so far; those that were
        seen before are not looked at again."""
        ...

    def legal(self) -> Mask:
        """What may follow what stands, and what was entered since: uint32 [W]."""
        ...

    def enter(self, token: int) -> bool:
        """Step on to a draft token that `legal` has here; False, and no step, if nothing can follow
        it: it ends the session."""
        ...

    def leave(self, count: int) -> None:
        """Step back so many tokens that were entered; before anything else is asked, all."""
        ...

    def masks(self, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> NDArray[np.uint32]:
        """uint32 [1 + N, W]: what may follow the root, and each node of a tree.

        Below an id that is not legal itself it says anything: nothing there can stand.
        """
        ...

    def path_masks(self, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
        """uint32 [P, W]: what may follow each of these paths of draft tokens from the root."""
        ...

    def legal_prefix(self, tokens: Sequence[int]) -> int:
        """How many of these draft tokens may follow one another from the root."""
        ...
