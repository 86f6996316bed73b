"""Which ids may follow where a session is, and at every node of a draft.

A mask is a bit set over target ids: uint32 [W], W = ceil(V / 32), id i is bit i % 32 of word
i // 32. N nodes of a tree, P paths.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Mask = NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)
MOST_THREADS: Final = 8
"""That work out masks; at most half of the cores."""


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

    @property
    def words(self) -> int:
        """W."""
        ...

    @property
    def matcher(self) -> LLMatcher | None:
        """What is to be asked for the mask of where it is; None: nobody."""
        ...

    def finish(self, mask: Mask) -> None:
        """Make what `matcher` says (without one: what is there) what is legal, in place."""
        ...

    def enter(self, token: int) -> bool:
        """Step on to a draft token that is legal here; False, and no step, if nothing can follow
        it: it ends the session."""
        ...

    def leave(self, count: int) -> None:
        """Step back so many tokens that were entered; before anything else is asked, all."""
        ...

    def path_masks(self, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
        """uint32 [P, W]: what may follow each of these paths of draft tokens from the root."""
        ...

    def legal_prefix(self, tokens: Sequence[int]) -> int:
        """How many of these draft tokens may follow one another from the root."""
        ...


def legal_of(constraints: Sequence[Constraint]) -> NDArray[np.uint32]:
    """uint32 [P, W]: what may follow where each of P constraints is.

    One call of the library: each gives up the interpreter lock, and to have it back takes as long
    as another thread may keep it, which is ten times what a mask does.
    """
    masks = np.empty((len(constraints), constraints[0].words), dtype=np.uint32)
    asked = [
        (matcher, row)
        for row, constraint in enumerate(constraints)
        if (matcher := constraint.matcher) is not None
    ]
    if len(asked) == 1:
        matcher, row = asked[0]
        matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
    elif asked:
        where = (masks.ctypes.data, masks[0].nbytes, len(masks))
        _executor().unsafe_compute_mask_ptr(asked, *where)
    for constraint, mask in zip(constraints, masks, strict=True):
        constraint.finish(mask)
    return masks


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return LLExecutor(min(MOST_THREADS, max(1, cores // 2)))
