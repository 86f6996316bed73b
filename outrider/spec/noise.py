"""Counter-based noise: a pure function of (seed, stream, absolute position, token id).

Definition, modulo 2^64 (mix64 and GOLDEN64: `outrider.spec.mix64`):

    stream_key(seed, stream) = BLAKE2b(seed, 8 bytes out, personalised by the stream)
    key(stream_key, position) = mix64(stream_key + position)
    bits(key, id)             = mix64(key + (id + 1) * GOLDEN64)
    U = (floor(bits / 2^12) + 1/2) * 2^-52        an odd multiple of 2^-53, exact in float64
    G = -log(-log U)                              Gumbel(0, 1), in [-3.61, 36.74]

The seed and the BLAKE2b output are 8 bytes, least significant first. mix64 is invertible, so a
stream's key can be computed from noise bits. The seed and the keys of other streams can be found
only by trying seeds. A drafter may therefore hold the key of the stream from which it draws: it
does not learn the random draws that decide on its drafts, as long as the seed cannot be guessed.

The bits of the ids at one position are a SplitMix64 sequence whose initial state is the key, so a
kernel needs one multiply-add and one mix64 per id, and no state. U uses the top 52 bits instead of
53, because with 53 bits the sum `x + 1/2` is rounded in float64 and U = 1 would be possible. With
52 bits, 0 < U < 1 always holds.

The integer arithmetic gives the same results everywhere (numpy here, torch in
`outrider.engine.noise`). The logarithm may differ by an ulp between platforms, which can lower the
acceptance rate at near ties but never makes the output inexact.

The four streams have different keys, and each is used once per position: TARGET chooses the token
in coupled sampling (and the drafter's guess of it), DRAFT draws the children of a proposal from the
draft distribution, ACCEPT gives the random draws of the acceptance tests, and RECOVER draws the
token emitted after a rejection and the bonus token. Using one stream for two purposes would bias
the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from outrider.spec.mix64 import GOLDEN64, MASK64, mix64_array

SHARED_DRAW_ID = -1
"""Pseudo token id of the random draw that all siblings share under the target-only rule."""


Words = int | np.integer | Sequence[int] | NDArray[np.integer]
"""Integers in [-2^63, 2^64), as a scalar, a sequence or an array."""


class NoiseStream(IntEnum):
    """Independent noise streams. The values are fixed, because they are part of the noise's
    definition."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    RECOVER = 4


def _words(values: Words) -> NDArray[np.uint64]:
    """Convert integers in [-2^63, 2^64) to words modulo 2^64."""
    if isinstance(values, Sequence):
        # numpy would turn a list that mixes small and large ints into floats.
        return np.array([int(v) & MASK64 for v in values], dtype=np.uint64)
    array = np.asarray(values)
    assert array.dtype.kind in "iu", array.dtype
    return array.astype(np.uint64)


@lru_cache(maxsize=4096)
def stream_key(seed: int, stream: NoiseStream) -> int:
    """Return the 64-bit key of one noise stream of a session with the 64-bit seed `seed`."""
    person = b"outrider " + stream.name.lower().encode()
    digest = blake2b((seed & MASK64).to_bytes(8, "little"), digest_size=8, person=person).digest()
    return int.from_bytes(digest, "little")


def noise_keys(stream_keys: Words, positions: Words) -> NDArray[np.uint64]:
    """Return mix64(stream_key + position), uint64: the keys of positions (>= 0) in noise streams.

    The arguments are broadcast.
    """
    with np.errstate(over="ignore"):
        return mix64_array(np.asarray(_words(stream_keys) + _words(positions), dtype=np.uint64))


def prefix_keys(stream_keys: Words, digests: Words) -> NDArray[np.uint64]:
    """Return mix64(stream_key ^ digest), uint64: the keys of prefixes, given by their digests, in
    noise streams. The arguments are broadcast.

    Drafts that are made ahead, before it is known whether they will be used, take their noise from
    these keys. Two such drafts for the same position get the same noise only if they continue the
    same prefix.
    """
    return mix64_array(np.asarray(_words(stream_keys) ^ _words(digests), dtype=np.uint64))


def bits_from_keys(keys: NDArray[np.uint64], ids: Words) -> NDArray[np.uint64]:
    """Return 64 noise bits, uint64, for each pair of a key and a token id. The arguments are
    broadcast. An id may also be SHARED_DRAW_ID (-1), for a draw that belongs to no token."""
    with np.errstate(over="ignore"):
        counters = (_words(ids) + np.uint64(1)) * np.uint64(GOLDEN64)
        return mix64_array(np.asarray(keys + counters, dtype=np.uint64))


def uniform_from_bits(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert noise bits to uniform variates in the open interval (0, 1), float64, same shape."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def noise_bits(seed: Words, stream: NoiseStream, position: Words, ids: Words) -> NDArray[np.uint64]:
    """Return 64 noise bits, uint64, for each triple of a seed, a position and a token id.

    The three arguments are broadcast, and the result has the broadcast shape.
    """
    seeds, places = np.unique(_words(seed), return_inverse=True)
    keys = np.array([stream_key(int(one), stream) for one in seeds], dtype=np.uint64)
    return bits_from_keys(noise_keys(keys[places.reshape(np.shape(seed))], position), ids)


def uniform(seed: Words, stream: NoiseStream, position: Words, ids: Words) -> NDArray[np.float64]:
    """Return uniform variates in (0, 1), float64, for the noise bits that `noise_bits` returns."""
    return uniform_from_bits(noise_bits(seed, stream, position, ids))


def gumbel_from_bits(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert noise bits to Gumbel(0, 1) variates, float64, all finite, same shape."""
    return np.asarray(-np.log(-np.log(uniform_from_bits(bits))), dtype=np.float64)


def gumbel(seed: Words, stream: NoiseStream, position: Words, ids: Words) -> NDArray[np.float64]:
    """Return Gumbel(0, 1) variates, float64, all finite, for the noise bits that `noise_bits`
    returns."""
    return gumbel_from_bits(noise_bits(seed, stream, position, ids))
