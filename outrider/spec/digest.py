"""Prefix digests: a 64-bit hash chain over token ids that content-addresses a committed prefix.

    digest(prefix + [t]) = mix64(digest(prefix) ^ mix64(t + TOKEN_OFFSET))

mix64 is a bijection, so two prefixes of which one extends the other by a token never collide by
construction of a step; unrelated prefixes collide with probability 2^-64. This is no defence
against an adversary who wants a collision: a digest addresses a proposal, it proves nothing.
`outrider.engine.noise.extend_digests` is the same chain on torch int64 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.spec.mix64 import (
    MASK64,
    MULTIPLIER_A,
    MULTIPLIER_B,
    mix64,
    mix64_array,
    mix64_in_place,
)

EMPTY_DIGEST = 0x6F75747269646572
"""Digest of the empty prefix; not 0, which means "no proposal" on the wire."""
TOKEN_OFFSET = 0xD1B54A32D192ED03
"""Moves small token ids away from 0, the fixed point of mix64."""
_OFFSET = np.uint64(TOKEN_OFFSET)
_FEW_TOKENS = 16
"""Up to here plain numbers are faster than arrays."""
_FEW_ROWS = 12
"""And up to so many prefixes that have tokens left: a step of arrays takes six microseconds, a
token by plain numbers a third of one."""


def extend_digest(digest: int, token_ids: Iterable[int] | NDArray[np.integer]) -> int:
    """Digest of the prefix with `token_ids` (>= 0) appended; in [0, 2^64).

    An array takes about half the time of a list of the same ids: the ids are hashed in one vector
    operation, and only their combination is sequential.
    """
    if isinstance(token_ids, np.ndarray):
        words: Iterable[int] = _token_words(token_ids).tolist()
    else:
        words = (mix64(int(token) + TOKEN_OFFSET) for token in token_ids)
    return _follow(digest, words)


def extend_digests(
    digests: NDArray[np.uint64], token_ids: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """One step for many prefixes at once: digests [B], token_ids [B] (>= 0) -> digests [B]."""
    return mix64_array(digests ^ _token_words(token_ids))


def extend_ragged(
    digests: NDArray[np.uint64], counts: NDArray[np.int64], token_ids: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Digests [B] of many prefixes, each with its part of `token_ids` (>= 0) appended.

    counts [B]: how many tokens each prefix gets; they own consecutive parts of `token_ids`. All
    prefixes with tokens left advance together. When only a few are left, as with one long prompt
    among decoding sessions, these are finished one by one.
    """
    result = digests.copy()
    if not len(token_ids):
        return result
    if len(token_ids) <= _FEW_TOKENS:
        tokens, start = token_ids.tolist(), 0
        for place, count in enumerate(counts.tolist()):
            result[place] = extend_digest(int(digests[place]), tokens[start : start + count])
            start += count
        return result
    ends = np.cumsum(counts)
    starts = ends - counts
    words, last = _token_words(token_ids), len(token_ids) - 1
    steps = 0
    if len(counts) > _FEW_ROWS:
        steps = int(np.partition(counts, -1 - _FEW_ROWS)[-1 - _FEW_ROWS])
    for step in range(steps):
        going = counts > step
        # Where a prefix has no token left, that of another one stands in for it.
        stepped = result ^ words[np.minimum(starts + step, last)]
        mix64_in_place(stepped)
        np.copyto(result, stepped, where=going)
    for place in np.flatnonzero(counts > steps).tolist():
        left = words[int(starts[place]) + steps : int(ends[place])].tolist()
        result[place] = _follow(int(result[place]), left)
    return result


def _follow(digest: int, words: Iterable[int]) -> int:
    """The chain from a digest on, by what each token contributes."""
    for word in words:
        # mix64, written out: a long prompt takes as many steps as it has tokens.
        digest ^= word
        digest = ((digest ^ (digest >> 30)) * MULTIPLIER_A) & MASK64
        digest = ((digest ^ (digest >> 27)) * MULTIPLIER_B) & MASK64
        digest ^= digest >> 31
    return digest & MASK64


def _token_words(token_ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """What each id contributes to a chain."""
    words = token_ids.astype(np.uint64)
    words += _OFFSET
    mix64_in_place(words)
    return words
