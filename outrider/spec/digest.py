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

from outrider.spec.mixing import MASK64, mix64, mix64_array

EMPTY_DIGEST = 0x6F75747269646572
"""Digest of the empty prefix; not 0, which means "no proposal" on the wire."""
TOKEN_OFFSET = 0xD1B54A32D192ED03
"""Moves small token ids away from 0, the fixed point of mix64."""


def extend_digest(digest: int, token_ids: Iterable[int]) -> int:
    """Digest of the prefix with `token_ids` (>= 0) appended; in [0, 2^64)."""
    for token in token_ids:
        digest = mix64(digest ^ mix64(int(token) + TOKEN_OFFSET))
    return digest & MASK64


def extend_digests(
    digests: NDArray[np.uint64], token_ids: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """One step for many prefixes at once: digests [B], token_ids [B] (>= 0) -> digests [B]."""
    with np.errstate(over="ignore"):
        words = token_ids.astype(np.uint64) + np.uint64(TOKEN_OFFSET)
    return mix64_array(digests ^ mix64_array(words))
