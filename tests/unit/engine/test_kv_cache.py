"""Block allocation and the bookkeeping of sequences."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.engine.block_allocator import BlockAllocator
from outrider.engine.kv_cache import KVPool, KVSequence
from outrider.errors import ResourceExhaustedError


def make_pool(num_blocks: int = 8, block_tokens: int = 4) -> KVPool:
    return KVPool(
        num_layers=2, num_kv_heads=3, head_dim=2, num_blocks=num_blocks, block_tokens=block_tokens
    )


def write(sequence: KVSequence, pool: KVPool, labels: list[int]) -> None:
    """Write rows as a forward would, every value being the row's label."""
    sequence.begin(torch.tensor(labels))
    slots = sequence.slots(sequence.len, sequence.len + len(labels))
    pool.storage[:, :, :, slots] = torch.tensor(labels, dtype=torch.float32)[:, None]


def stored(sequence: KVSequence, pool: KVPool) -> list[int]:
    values = pool.storage[:, :, :, sequence.slots(0, sequence.len)]
    assert bool((values == values[:1, :1, :1, :, :1]).all()), "layers disagree"
    labels = values[0, 0, 0, :, 0].to(torch.int64)
    assert torch.equal(labels, sequence.positions(0, sequence.len))
    return [int(label) for label in labels]


def test_a_sequence_reserves_all_its_blocks_at_once() -> None:
    pool = make_pool()
    sequence = pool.allocate(9)
    assert (sequence.capacity, sequence.num_blocks, pool.free_blocks) == (12, 3, 5)
    assert (len(sequence), sequence.len) == (0, 0)


def test_an_empty_pool_is_a_typed_error_and_takes_nothing() -> None:
    pool = make_pool()
    pool.allocate(20)
    with pytest.raises(ResourceExhaustedError, match="4 KV blocks are needed, 3 of 8 are free"):
        pool.allocate(16)
    assert pool.free_blocks == 3
    pool.allocate(12)
    assert pool.free_blocks == 0


def test_releasing_twice_returns_the_blocks_once() -> None:
    pool = make_pool()
    sequence, other = pool.allocate(8), pool.allocate(8)
    sequence.release()
    sequence.release()
    assert pool.free_blocks == 6
    assert sequence.is_released
    assert not other.is_released
    with pytest.raises(ValueError, match="released"):
        sequence.commit([])


def test_the_smallest_extent_that_fits_is_taken() -> None:
    allocator = BlockAllocator(10)
    first, second, third = (
        allocator.allocate_blocks(2),
        allocator.allocate_blocks(1),
        allocator.allocate_blocks(4),
    )
    allocator.free_blocks(first)
    allocator.free_blocks(third)
    assert allocator.allocate_blocks(2) == [0, 1]
    assert second == [2]
    assert allocator.allocate_blocks(7) == [3, 4, 5, 6, 7, 8, 9]


def test_a_sequence_is_fragmented_only_when_no_extent_fits() -> None:
    pool = make_pool(num_blocks=6)
    held = [pool.allocate(4) for _ in range(6)]
    for index in (0, 2, 3, 5):
        held[index].release()
    pair = pool.allocate(8)
    assert pair.start == 2 * pool.block_tokens
    scattered = pool.allocate(8)
    assert scattered.start is None
    assert scattered.slots(0, 8).tolist() == [0, 1, 2, 3, 20, 21, 22, 23]


def test_any_order_of_allocations_and_releases_neither_leaks_nor_overlaps() -> None:
    chooser = random.Random(7)
    pool, held = make_pool(num_blocks=32), list[KVSequence]()
    for _ in range(600):
        if held and chooser.random() < 0.5:
            held.pop(chooser.randrange(len(held))).release()
        else:
            try:
                held.append(pool.allocate(chooser.randint(1, 40)))
            except ResourceExhaustedError:
                continue
        slots = [slot for s in held for slot in s.slots(0, s.capacity).tolist()]
        assert len(set(slots)) == len(slots)
        assert pool.free_blocks == 32 - sum(s.num_blocks for s in held)
    for sequence in held:
        sequence.release()
    assert pool.free_blocks == 32
    assert pool.allocate(32 * pool.block_tokens).start == 0


@pytest.mark.parametrize("fragmented", [False, True])
def test_commit_keeps_the_named_rows_in_order(fragmented: bool) -> None:
    pool = make_pool(block_tokens=2)
    held = [pool.allocate(2) for _ in range(8)]
    for index in (1, 3, 4, 6, 7) if fragmented else range(8):
        held[index].release()
    sequence = pool.allocate(10)
    assert (sequence.start is None) is fragmented
    write(sequence, pool, [10, 11, 12])
    sequence.commit([0, 1, 2])
    write(sequence, pool, [20, 21, 22, 23, 24])
    sequence.commit([0, 2, 4])
    assert stored(sequence, pool) == [10, 11, 12, 20, 22, 24]
    sequence.truncate(2)
    write(sequence, pool, [30])
    sequence.commit([0])
    assert stored(sequence, pool) == [10, 11, 30]
    write(sequence, pool, [40, 41])
    sequence.commit([])
    assert stored(sequence, pool) == [10, 11, 30]


@pytest.mark.parametrize("rows", [[1], [0, 0], [1, 0], [-1], [3]])
def test_rows_that_cannot_be_committed_are_refused(rows: list[int]) -> None:
    pool = make_pool()
    sequence = pool.allocate(8)
    write(sequence, pool, [5, 6, 7] if rows == [3] else [5])
    with pytest.raises(ValueError, match="row"):
        sequence.commit(rows)
    assert sequence.len == 0


def test_a_commit_consumes_the_rows_of_the_last_forward() -> None:
    pool = make_pool()
    sequence = pool.allocate(8)
    write(sequence, pool, [1, 2])
    sequence.commit([0])
    with pytest.raises(ValueError, match="row 0"):
        sequence.commit([0])


def test_truncate_checks_its_bounds() -> None:
    pool = make_pool()
    sequence = pool.allocate(8)
    write(sequence, pool, [1, 2, 3])
    sequence.commit([0, 1, 2])
    for length in (-1, 4):
        with pytest.raises(ValueError, match="length"):
            sequence.truncate(length)
    assert stored(sequence, pool) == [1, 2, 3]


def test_sizes_must_be_positive() -> None:
    for num_blocks, block_tokens in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            make_pool(num_blocks, block_tokens)
    with pytest.raises(ValueError, match="at least 1"):
        make_pool().allocate(0)


@pytest.mark.parametrize("by_tables", [True, False])
def test_a_sequence_begins_with_the_blocks_of_another(by_tables: bool) -> None:
    pool = make_pool()
    pool.use_block_tables(by_tables)
    first = pool.new_sequence()
    assert first.reserve(12)
    write(first, pool, list(range(10)))
    first.commit(range(10))
    second = pool.new_sequence()
    assert second.attach_blocks(first.blocks[:2], 11)
    assert (second.len, second.capacity) == (8, 12)
    assert (list(second.blocks[:2]) == list(first.blocks[:2])) is by_tables
    assert pool.free_blocks == (4 if by_tables else 2)
    if not by_tables:
        assert stored(second, pool) == list(range(8))
        write(second, pool, [8, 9])
        second.commit(range(2))
        first.release()
        assert stored(second, pool) == list(range(10))
    second.release()
    first.release()
    assert pool.free_blocks == 8


@pytest.mark.parametrize("by_tables", [True, False])
def test_a_sequence_that_finds_no_room_behind_the_blocks_of_another_holds_none(
    by_tables: bool,
) -> None:
    pool = make_pool()
    pool.use_block_tables(by_tables)
    first = pool.allocate(20)
    second = pool.new_sequence()
    assert not second.attach_blocks(first.blocks[:2], 24)
    assert (second.len, second.num_blocks, pool.free_blocks) == (0, 0, 3)
    assert not pool.ledger.shared_blocks(first.blocks)
    assert second.reserve(12)
    with pytest.raises(ValueError, match="holds 3 blocks"):
        second.attach_blocks(first.blocks[:1], 4)
