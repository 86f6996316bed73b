"""Prefix digests: a 64-bit hash chain over token ids that content-addresses a committed prefix.

    digest(prefix + [t]) = mix64(digest(prefix) ^ mix64(t + TOKEN_OFFSET))

mix64 is a bijection, so two different tokens appended to the same prefix never give the same
digest. Unrelated prefixes collide with probability 2^-64. An adversary can construct collisions: a
digest identifies the prefix of a proposal but is no proof of it.
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
"""Offset that is added to token ids, so that none becomes 0, the fixed point of mix64."""
_OFFSET = np.uint64(TOKEN_OFFSET)
_FEW_TOKENS = 16
"""Maximum number of tokens for which Python integers are faster than arrays."""
_FEW_ROWS = 12
"""Maximum number of unfinished prefixes for which Python integers are faster than arrays. One step
over arrays takes about six microseconds, one token with Python integers about 0.3 microseconds."""


def extend_digest(digest: int, token_ids: Iterable[int] | NDArray[np.integer]) -> int:
    """Return the digest, in [0, 2^64), of the prefix with `token_ids` (>= 0) appended.

    An array takes about half the time of a list of the same ids, because the ids are hashed in one
    vector operation and only their combination is sequential.
    """
    if isinstance(token_ids, np.ndarray):
        words: Iterable[int] = _token_words(token_ids).tolist()
    else:
        words = (mix64(int(token) + TOKEN_OFFSET) for token in token_ids)
    return _follow(digest, words)


def extend_digests(
    digests: NDArray[np.uint64], token_ids: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Append one token to each of B prefixes, and return the new digests, uint64 [B].

    `digests` [B] are those of the prefixes, and `token_ids` [B] (>= 0) the tokens.
    """
    return mix64_array(digests ^ _token_words(token_ids))


def extend_ragged(
    digests: NDArray[np.uint64], counts: NDArray[np.int64], token_ids: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Append tokens to B prefixes, a different number to each, and return their digests, uint64
    [B].

    `counts` [B] is the number of tokens per prefix. `token_ids` (>= 0) contains the tokens of all
    prefixes, one prefix after the other. The prefixes advance together, one token per step. When
    only a few of them have tokens left, such as one long prompt among decoding sessions, the rest
    is computed one prefix at a time.
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
        # A finished prefix reads some other token here; its result is discarded below.
        stepped = result ^ words[np.minimum(starts + step, last)]
        mix64_in_place(stepped)
        np.copyto(result, stepped, where=going)
    for place in np.flatnonzero(counts > steps).tolist():
        left = words[int(starts[place]) + steps : int(ends[place])].tolist()
        result[place] = _follow(int(result[place]), left)
    return result


def _follow(digest: int, words: Iterable[int]) -> int:
    """Continue the chain from a digest with the hashed words of tokens."""
    for word in words:
        # mix64 is inlined, because a long prompt takes one step for each token.
        digest ^= word
        digest = ((digest ^ (digest >> 30)) * MULTIPLIER_A) & MASK64
        digest = ((digest ^ (digest >> 27)) * MULTIPLIER_B) & MASK64
        digest ^= digest >> 31
    return digest & MASK64


def _token_words(token_ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return the hashed word of each token id, as the chain combines it with the digest."""
    words = token_ids.astype(np.uint64)
    words += _OFFSET
    mix64_in_place(words)
    return words
