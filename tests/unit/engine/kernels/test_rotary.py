"""Rotary embedding and the KV write against the engine's layers and the heads' layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engine.heads.layers import apply_rotary, rotary_tables
from outrider.engine.kernels.attention.rotary import (
    rotary_table,
    rotary_table_torch,
    rotary_table_triton,
    rotary_write,
    rotary_write_torch,
    rotary_write_triton,
)
from outrider.engine.layers import norm_heads, rotate, rotations
from outrider.errors import InvalidRequestError

EPS = 1e-5
# The interpreter cuts bfloat16 off where torch rounds: one unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _inv_freq(dim: int) -> Tensor:
    return 1.0 / (10_000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _positions(num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 4000, (num_rows,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("dim", [6, 64, 80])
def test_table_is_that_of_the_heads(dim: int) -> None:
    positions = _positions(5)
    cos, sin = rotary_tables(positions, _inv_freq(dim), torch.float32)
    for table in (rotary_table_torch, rotary_table_triton, rotary_table):
        got = table(positions, _inv_freq(dim))
        assert got.shape == (5, 2, dim // 2)
        torch.testing.assert_close(got[:, 0], cos[:, 0, : dim // 2], atol=1e-6, rtol=0)
        torch.testing.assert_close(got[:, 1], sin[:, 0, : dim // 2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_twin_rotates_neighbours_as_the_target_does(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, dim, rows = 6, 2, 16, 5
    qkv = _normal(rows, heads + 2 * kv_heads, dim, seed=1, dtype=dtype)
    norms = _normal(heads + kv_heads, dim, seed=2, dtype=dtype) if normed else None
    expected = qkv if norms is None else norm_heads(qkv, norms, EPS)
    turns = rotations(
        _positions(rows), _inv_freq(dim), num_rotated=heads + kv_heads, num_plain=kv_heads
    )
    expected = rotate(expected, turns)
    cache = torch.zeros(2, kv_heads, 8, dim, dtype=dtype)
    slots = torch.tensor([3, 0, 7, 5, 1])
    queries = rotary_write_torch(
        qkv,
        rotary_table(_positions(rows), _inv_freq(dim)),
        slots,
        *cache,
        num_heads=heads,
        interleaved=True,
        qk_norms=norms,
        eps=EPS,
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(queries, expected[:, :heads], atol=tolerance, rtol=tolerance)
    written = cache[:, :, slots].permute(2, 0, 1, 3).flatten(1, 2)
    torch.testing.assert_close(written, expected[:, heads:], atol=tolerance, rtol=tolerance)
    assert torch.equal(written[:, kv_heads:], qkv[:, heads + kv_heads :])


def test_twin_rotates_halves_as_the_heads_do() -> None:
    heads, kv_heads, dim, rows = 3, 3, 20, 4
    qkv = _normal(rows, heads + 2 * kv_heads, dim, seed=3)
    cos, sin = rotary_tables(_positions(rows), _inv_freq(dim), torch.float32)
    expected = apply_rotary(qkv[:, : heads + kv_heads].clone(), cos, sin)
    cache = torch.zeros(2, kv_heads, 4, dim)
    queries = rotary_write_torch(
        qkv,
        rotary_table(_positions(rows), _inv_freq(dim)),
        torch.arange(rows),
        *cache,
        num_heads=heads,
        interleaved=False,
    )
    torch.testing.assert_close(queries, expected[:, :heads], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[0].transpose(0, 1), expected[:, heads:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 80), (2, 2, 6)])
def test_kernel_agrees_with_its_twin(
    dtype: torch.dtype, interleaved: bool, normed: bool, heads: int, kv_heads: int, dim: int
) -> None:
    rows = 4
    # Rows of a wider tensor, as a fused projection may leave them.
    wide = _normal(rows, heads + 2 * kv_heads + 1, dim, seed=4, dtype=dtype)
    norms = _normal(heads + kv_heads, dim, seed=5, dtype=dtype) if normed else None
    table = rotary_table(_positions(rows), _inv_freq(dim))
    # Slot 0 is written by the last row, and the row that has no slot must not touch it.
    slots = torch.tensor([9, -1, 4, 0])
    results = []
    for write in (rotary_write_torch, rotary_write_triton):
        qkv = wide.clone()[:, 1:]
        cache = torch.full((2, kv_heads, 10, dim), 7.0, dtype=dtype)
        queries = write(
            qkv,
            table,
            slots,
            *cache,
            num_heads=heads,
            interleaved=interleaved,
            qk_norms=norms,
            eps=EPS,
        )
        assert queries.data_ptr() == qkv.data_ptr() and queries.shape == (rows, heads, dim)
        results.append((queries, *cache))
    tolerance = TOLERANCE[dtype] * (3 if normed else 1)
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    keys, values = results[1][1:]
    untouched = [1, 2, 3, 5, 6, 7, 8]
    assert bool((keys[:, untouched] == 7).all()) and bool((values[:, untouched] == 7).all())
    source = wide[:, 1 + heads + kv_heads :][[3, 2, 0]].transpose(0, 1)
    assert torch.equal(values[:, [0, 4, 9]], source)


def test_shapes_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros(2, 2, 4, 8)
    with pytest.raises(InvalidRequestError, match="query heads"):
        rotary_write(
            torch.zeros(1, 7, 8),
            torch.zeros(1, 2, 4),
            torch.zeros(1, dtype=torch.int64),
            *cache,
            num_heads=4,
            interleaved=True,
        )
