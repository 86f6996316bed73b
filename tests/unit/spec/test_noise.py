from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest

from outrider.spec.mix64 import GOLDEN64, mix64
from outrider.spec.noise import (
    SHARED_DRAW_ID,
    NoiseStream,
    gumbel,
    noise_bits,
    noise_keys,
    prefix_keys,
    stream_key,
    uniform,
    uniform_from_bits,
)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("token", [SHARED_DRAW_ID, 0, 1, 151935, 2**31 - 1])
def test_bits_follow_the_written_definition(seed: int, token: int) -> None:
    for position in (0, 1, 2**20):
        hashed = blake2b(seed.to_bytes(8, "little"), digest_size=8, person=b"outrider accept")
        key = mix64(int.from_bytes(hashed.digest(), "little") + position)
        expected = mix64(key + (token + 1) * GOLDEN64)
        assert int(noise_bits(seed, NoiseStream.ACCEPT, position, token)) == expected


def test_lists_of_small_and_large_keys_stay_exact() -> None:
    together = noise_keys([1, 2**64 - 1], [5, 6])
    alone = [noise_keys(1, 5), noise_keys(2**64 - 1, 6)]
    assert together.tolist() == [int(key) for key in alone]


def test_each_prefix_has_a_key_of_its_own_as_it_is_written() -> None:
    keys, digests = [7, 2**64 - 1], [1, 2**63, 2**64 - 5]
    found = prefix_keys(np.array(keys, np.uint64)[:, None], np.array(digests, np.uint64))
    assert found.tolist() == [[mix64(key ^ digest) for digest in digests] for key in keys]
    assert len(np.unique(found)) == 6
    assert int(prefix_keys(keys[1], digests[2])) == found[1, 2]


def test_uniforms_never_reach_zero_or_one() -> None:
    extremes = np.array([0, 2**64 - 1, 2**63, 4095, 4096], dtype=np.uint64)
    values = uniform_from_bits(extremes)
    assert values.min() == 2.0**-53
    assert values.max() == 1.0 - 2.0**-53
    assert np.isfinite(-np.log(-np.log(values))).all()


def test_streams_positions_and_seeds_have_different_noise() -> None:
    ids = np.arange(-1, 500)
    rows = [
        noise_bits(seed, stream, position, ids)
        for seed in (0, 1)
        for stream in NoiseStream
        for position in (0, 1, 2)
    ]
    assert len(np.unique(np.concatenate(rows))) == len(rows) * len(ids)


def test_noise_is_uniform_and_uncorrelated_between_neighbours() -> None:
    grid = uniform(
        np.arange(40)[:, None, None], NoiseStream.TARGET, np.arange(50)[:, None], np.arange(50)
    )
    counts, _ = np.histogram(grid, bins=64, range=(0.0, 1.0))
    expected = grid.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * np.sqrt(2 * 63)
    for axis in range(3):
        a, b = np.moveaxis(grid, axis, 0)[:-1], np.moveaxis(grid, axis, 0)[1:]
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 6 / np.sqrt(a.size)
    streams = [uniform(np.arange(2000)[:, None], s, 7, np.arange(50)).ravel() for s in NoiseStream]
    off_diagonal = np.corrcoef(streams) - np.eye(4)
    assert np.abs(off_diagonal).max() < 6 / np.sqrt(100_000)


def test_gumbel_noise_has_the_moments_of_its_law() -> None:
    values = gumbel(np.arange(1000)[:, None], NoiseStream.TARGET, 3, np.arange(200))
    assert abs(values.mean() - np.euler_gamma) < 0.02
    assert abs(values.var() - np.pi**2 / 6) < 0.05


def test_the_definition_is_pinned() -> None:
    """Both sides of a wire compute this; a change needs a new protocol version."""
    assert noise_bits(42, NoiseStream.TARGET, 7, np.arange(2)).tolist() == [
        18312800985908717307,
        11393997486978847410,
    ]


def test_keys_of_streams_look_unrelated() -> None:
    """Neighbouring seeds and the streams of one seed differ in half of their bits."""
    keys = np.array(
        [[stream_key(seed, stream) for stream in NoiseStream] for seed in range(2000)],
        dtype=np.uint64,
    )
    assert len(np.unique(keys)) == keys.size
    for pairs in (keys[1:] ^ keys[:-1], keys ^ np.roll(keys, 1, axis=1)):
        flipped = np.bitwise_count(pairs)
        assert abs(flipped.mean() - 32.0) < 6 * 4.0 / np.sqrt(pairs.size)
