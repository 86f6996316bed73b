# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Noise inside kernels: the integers of `outrider.spec.noise`, and an estimate within its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from outrider.engine.kernels.noise import (
    best_perturbed,
    gumbel,
    gumbel_estimate,
    noise_bits,
    noise_key,
    row_keys,
    uniform,
)
from outrider.engine.kernels.session_tensors import stream_key_row
from outrider.spec import noise as spec
from outrider.spec.noise import NoiseStream
from outrider.spec.sampling import SamplingParams
from tests.reference.device_rounds import DEVICE

SEEDS = (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF)


@triton.jit
def _noise(
    keys_ptr, streams_ptr, positions_ptr, ids_ptr, bits_ptr, uniform_ptr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    stream = tl.load(streams_ptr + row)
    key = noise_key(keys_ptr, row, stream, tl.load(positions_ptr + row))
    bits = noise_bits(key, tl.load(ids_ptr + columns))
    tl.store(bits_ptr + row * BLOCK + columns, bits.to(tl.int64))
    tl.store(uniform_ptr + row * BLOCK + columns, uniform(bits))


def _stream_keys(seed: int) -> np.ndarray:
    return stream_key_row(SamplingParams(seed=seed))


@triton.jit
def _variates(bits_ptr, exact_ptr, estimate_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + places).to(tl.uint64)
    tl.store(exact_ptr + places, gumbel(bits))
    tl.store(estimate_ptr + places, gumbel_estimate(bits))


@triton.jit
def _best(scores_ptr, best_ptr, column_ptr, key_ptr, count, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    valid = columns < count
    scores = tl.load(scores_ptr + columns, mask=valid, other=float("-inf"))
    key = tl.load(key_ptr).to(tl.uint64)
    best, column = best_perturbed(scores, columns, valid, key, scores_ptr, False)
    tl.store(best_ptr, best)
    tl.store(column_ptr, column)


def test_bits_and_uniforms_are_numpys() -> None:
    cases = [(s, m, p) for s in SEEDS for m in NoiseStream for p in (0, 17, 2**31 - 1)]
    stream_keys = np.stack([_stream_keys(case[0]) for case in cases])
    streams, positions = (np.array([case[i] for case in cases]) for i in (1, 2))
    ids = np.array([-1, 0, 1, 2, 31_999, 128_255, 151_935, 2**31 - 1], dtype=np.int32)
    bits = torch.zeros(len(cases), len(ids), dtype=torch.int64, device=DEVICE)
    uniforms = torch.zeros(bits.shape, dtype=torch.float64, device=DEVICE)
    _noise[(len(cases),)](
        torch.from_numpy(stream_keys).to(DEVICE),
        torch.from_numpy(streams.astype(np.int32)).to(DEVICE),
        torch.from_numpy(positions.astype(np.int32)).to(DEVICE),
        torch.from_numpy(ids).to(DEVICE),
        bits,
        uniforms,
        BLOCK=len(ids),
    )
    keys = np.concatenate([spec.noise_keys(spec.stream_key(s, m), [p]) for s, m, p in cases])
    expected = spec.bits_from_keys(keys[:, None], ids[None, :])
    assert np.array_equal(bits.cpu().numpy().view(np.uint64), expected)
    assert np.array_equal(uniforms.cpu().numpy(), spec.uniform_from_bits(expected))


def test_row_keys_are_numpys() -> None:
    stream_keys = np.array(SEEDS, dtype=np.uint64)
    positions = np.arange(len(SEEDS)) * 999
    words = torch.from_numpy(stream_keys.view(np.int64))
    keys = row_keys(words, torch.from_numpy(positions).to(torch.int32))
    expected = spec.noise_keys(stream_keys, positions)
    assert np.array_equal(keys.numpy().view(np.uint64), expected)


def test_variates_and_their_estimates() -> None:
    """Random words, and both ends and the middle of (0, 1), where float32 has least to spare."""
    steps = np.array([0, 1, 2, 3, 1000, 2**20, 2**30, 2**40, 2**48, 2**51 - 1], dtype=np.uint64)
    mantissas = np.concatenate([steps, 2**52 - 1 - steps, 2**51 - 1 - steps, 2**51 + steps])
    sixteenths = np.arange(1, 16, dtype=np.uint64) << np.uint64(48)
    random = np.random.default_rng(0).integers(0, 2**52, 2048, dtype=np.uint64)
    words = np.concatenate([mantissas, sixteenths, sixteenths - 1, random])[:2048] << np.uint64(12)
    bits = torch.from_numpy(words.view(np.int64)).to(DEVICE)
    exact = torch.zeros(2048, dtype=torch.float64, device=DEVICE)
    estimate = torch.zeros(2048, dtype=torch.float32, device=DEVICE)
    _variates[(1,)](bits, exact, estimate, BLOCK=2048)
    expected = spec.gumbel_from_bits(words)
    assert np.allclose(exact.cpu().numpy(), expected, rtol=1e-14, atol=1e-14)
    assert np.abs(estimate.cpu().numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("spread", [0.0, 1e-4, 1.0, 1e6, 1e34])
def test_the_best_of_a_tile_is_exact_whatever_the_scale(spread: float) -> None:
    """Scores so close, or so large, that float32 sums cannot tell the best columns apart."""
    generator = torch.Generator().manual_seed(3)
    for trial, count in enumerate((128, 100, 1)):
        scores = torch.randn(count, generator=generator) * spread
        if trial == 1:
            scores[::3] = -torch.inf
        key = spec.noise_keys(spec.stream_key(trial, NoiseStream.TARGET), 5)
        noise = spec.gumbel(trial, NoiseStream.TARGET, 5, np.arange(count))
        perturbed = scores.numpy().astype(np.float64) + noise
        best = torch.zeros(1, dtype=torch.float64, device=DEVICE)
        column = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        word = torch.from_numpy(np.array([key]).view(np.int64)).to(DEVICE)
        _best[(1,)](scores.to(DEVICE), best, column, word, count, BLOCK=128)
        assert int(column) == int(perturbed.argmax())
        assert float(best) == pytest.approx(perturbed.max(), rel=1e-14)


def test_the_best_of_nothing_is_the_first_column() -> None:
    scores = torch.full((5,), -torch.inf, device=DEVICE)
    best = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    column = torch.full((1,), 9, dtype=torch.int32, device=DEVICE)
    word = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _best[(1,)](scores, best, column, word, 5, BLOCK=16)
    assert (float(best), int(column)) == (-np.inf, 0)
