"""Moves of accepted KV and features against plain loops and the KV pool's own commit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention.compaction import (
    compact_kv,
    compact_kv_torch,
    compact_kv_triton,
    gather_rows,
    gather_rows_torch,
    gather_rows_triton,
)
from outrider.engine.kv_cache import KVPool
from outrider.errors import InvalidRequestError
from tests.unit.engine.kernels.trees import scattered

BLOCK = 4
CONTEXT = (6, 0, 9)


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _random_rows(rng: np.random.Generator, batch: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    rows = np.tile(np.arange(num_nodes), (batch, 1))
    counts = rng.integers(1, num_nodes + 1, size=batch)
    for b, count in enumerate(counts):
        picked = rng.permutation(np.arange(1, num_nodes))[: count - 1]
        rows[b, 1:count] = np.sort(picked)
    return _int32(rows.tolist()), _int32(counts.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("seed", range(4))
def test_accepted_rows_move_together(dtype: torch.dtype, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, num_nodes = 3, 7
    paging = scattered(rng, batch, 5, BLOCK)
    rows, counts = _random_rows(rng, batch, num_nodes)
    shape = (2, 2, 2, paging.num_pool_slots, dim)
    before = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = before.clone()
    for b, context in enumerate(CONTEXT):
        slots = paging.pool_slots(b, BLOCK)[context:]
        for j in range(int(counts[b])):
            expected[:, :, :, slots[j]] = before[:, :, :, slots[int(rows[b, j])]]
    for compact in (compact_kv_torch, compact_kv_triton, compact_kv):
        storage = before.clone()
        compact(
            storage,
            rows,
            counts,
            _int32(CONTEXT),
            paging.tables,
            paging.slots,
            block_tokens=BLOCK,
        )
        assert torch.equal(storage, expected)


@pytest.mark.parametrize("compact", [compact_kv_torch, compact_kv_triton])
def test_slots_past_the_table_are_left_alone(compact: object) -> None:
    assert callable(compact)
    storage = torch.arange(2 * 12.0).view(2, 1, 1, 12, 1).repeat(1, 1, 1, 1, 16)
    before = storage.clone()
    compact(
        storage,
        _int32([[0, 2, 3]]),
        _int32([3]),
        _int32([5]),
        _int32([[2, 0]]),
        _int32([0]),
        block_tokens=BLOCK,
    )
    # Logical slot 7 moves to 6; slot 8 has no block.
    before[:, :, :, 2] = before[:, :, :, 3]
    assert torch.equal(storage, before)


def test_kernel_keeps_what_a_commit_of_the_pool_keeps() -> None:
    pool = KVPool(num_layers=2, num_kv_heads=2, head_dim=16, num_blocks=6, block_tokens=BLOCK)
    pool.storage.normal_(generator=torch.Generator().manual_seed(3))
    sequence = pool.allocate(20)
    sequence.begin(torch.arange(8))
    sequence.commit(range(8))
    sequence.begin(torch.tensor([8, 9, 9, 10, 10]))
    storage = pool.storage.clone()
    compact_kv_triton(
        storage,
        _int32([[0, 2, 4, 3, 4]]),
        _int32([3]),
        _int32([8]),
        _int32([list(sequence.blocks)]),
        _int32([0]),
        block_tokens=BLOCK,
    )
    sequence.commit([0, 2, 4])
    kept = sequence.slots(0, sequence.len)
    assert sequence.len == 11
    assert torch.equal(storage[:, :, :, kept], pool.storage[:, :, :, kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 40, 2050])
def test_features_of_accepted_rows_are_gathered(dtype: torch.dtype, width: int) -> None:
    rows = _int32([[0, 2, -1], [0, 1, 2], [1, -1, -1]])
    wide = torch.randn(9, width + 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    src = wide[:, 3:]
    expected = src[[0, 2, 0, 3, 4, 5, 7, 6, 6]]
    for gather in (gather_rows_torch, gather_rows_triton, gather_rows):
        assert torch.equal(gather(src, rows, num_nodes=3), expected)


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="for 2 nodes"):
        gather_rows(torch.zeros(6, 4), _int32([[0, 1, 2], [0, 1, 2]]), num_nodes=2)
    with pytest.raises(InvalidRequestError, match="for 2 sessions"):
        compact_kv(
            torch.zeros(2, 1, 1, 8, 4),
            _int32([[0, 1]]),
            _int32([1]),
            _int32([0]),
            _int32([[0], [1]]),
            _int32([0, 1]),
            block_tokens=BLOCK,
        )
