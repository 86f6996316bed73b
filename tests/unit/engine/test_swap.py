"""KV that is swapped out comes back bit for bit, within a budget."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from outrider.engine.kv_cache import KVPool, KVSequence
from outrider.engine.swap import SavedKV, SwapSpace

BLOCK = 4
WAYS = pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])


def make_pool(dtype: torch.dtype = torch.float32, blocks: int = 32) -> KVPool:
    pool = KVPool(
        num_layers=2,
        num_kv_heads=3,
        head_dim=4,
        num_blocks=blocks,
        block_tokens=BLOCK,
        dtype=dtype,
    )
    fill(pool.storage, 1)
    return pool


def fill(storage: Tensor, seed: int) -> None:
    """Any bits at all: infinities and payloads of NaN, too."""
    words = {2: torch.int16, 4: torch.int32}[storage.element_size()]
    generator = torch.Generator().manual_seed(seed)
    limit = 2 ** (8 * storage.element_size() - 1)
    bits = torch.randint(-limit, limit, storage.shape, generator=generator)
    storage.view(words).copy_(bits)


def make_space(pool: KVPool, *others: Tensor, blocks: int = 20, staged: bool = False) -> SwapSpace:
    """With runs of 3 blocks, slabs of 7, and staging memory for 2 runs each way."""
    each = sum(s.nbytes * BLOCK // s.shape[3] for s in (pool.storage, *others))
    return SwapSpace(
        blocks * each,
        [pool.storage, *others],
        block_tokens=BLOCK,
        run_bytes=3 * each,
        slab_bytes=7 * each,
        staging_bytes=1,
        staged=staged,
    )


def bits(storage: Tensor, kv: KVSequence) -> Tensor:
    held = storage[:, :, :, kv.slots(0, kv.len)].contiguous()
    return held.view(torch.uint8).clone()


def holding(pool: KVPool, length: int) -> KVSequence:
    kv = pool.new_sequence()
    assert kv.reserve(length + 2)
    kv.advance(length)
    return kv


def save(space: SwapSpace, kv: KVSequence) -> SavedKV:
    saved = space.swap_out_sequence(kv)
    assert saved is not None
    return saved


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fetched", [False, True])
def test_every_bit_comes_back(dtype: torch.dtype, staged: bool, fetched: bool) -> None:
    pool = make_pool(dtype)
    head = torch.empty(2, 1, 2, 32 * BLOCK, 6, dtype=dtype)
    fill(head, 2)
    space = make_space(pool, head, staged=staged)
    kv = holding(pool, 66)
    before = bits(pool.storage, kv), bits(head, kv)
    saved = save(space, kv)
    assert space.used_bytes == 17 * space.block_bytes
    kv.reset()
    fill(pool.storage, 3)
    fill(head, 4)
    others = pool.allocate(9)
    assert kv.reserve(80)
    if fetched:
        assert space.prefetch(saved)
    space.swap_in_sequence(saved, kv)
    assert kv.len == 66
    assert torch.equal(bits(pool.storage, kv), before[0])
    assert torch.equal(bits(head, kv), before[1])
    assert space.used_bytes == 0
    others.release()


@WAYS
def test_making_a_space_changes_nothing_in_the_pool(staged: bool) -> None:
    pool = make_pool()
    before = pool.storage.view(torch.int32).clone()
    make_space(pool, staged=staged)
    assert torch.equal(pool.storage.view(torch.int32), before)


@WAYS
def test_sequences_that_come_and_go_keep_theirs(staged: bool) -> None:
    """In any order, through host memory in pieces, fetched in vain, dropped."""
    chooser = random.Random(3)
    pool = make_pool()
    space = make_space(pool, staged=staged)
    running: list[tuple[KVSequence, Tensor]] = []
    waiting: list[tuple[KVSequence, SavedKV, Tensor]] = []
    for turn in range(300):
        deed = chooser.randrange(5)
        if deed == 0 and pool.free_blocks > 8:
            kv = holding(pool, chooser.randint(1, 24))
            slots = kv.slots(0, kv.len)
            pool.storage[:, :, :, slots] = torch.randn(2, 2, 3, kv.len, 4)
            running.append((kv, bits(pool.storage, kv)))
        elif deed == 1 and running:
            kv, before = running.pop(chooser.randrange(len(running)))
            saved = space.swap_out_sequence(kv)
            kv.reset()
            if saved is not None:
                waiting.append((kv, saved, before))
        elif deed == 2 and waiting:
            kv, saved, before = waiting.pop(chooser.randrange(len(waiting)))
            if chooser.random() < 0.2:
                space.drop_copy(saved)
                space.drop_copy(saved)
            elif kv.reserve(saved.length):
                space.swap_in_sequence(saved, kv)
                assert torch.equal(bits(pool.storage, kv), before), turn
                running.append((kv, before))
            else:
                space.drop_copy(saved)
        elif deed == 3 and waiting:
            assert space.prefetch(chooser.choice(waiting)[1])
        elif running and chooser.random() < 0.5:
            running.pop(chooser.randrange(len(running)))[0].release()
        used = sum(-(-saved.length // BLOCK) for _, saved, _ in waiting)
        assert space.used_bytes == used * space.block_bytes <= space.budget_bytes


def test_the_budget_bounds_what_is_saved() -> None:
    pool = make_pool()
    space = make_space(pool, blocks=5)
    assert space.budget_bytes == 5 * space.block_bytes
    first, second = holding(pool, 12), holding(pool, 12)
    saved = save(space, first)
    assert not space.has_room_for(9) and space.has_room_for(8)
    assert space.swap_out_sequence(second) is None
    space.drop_copy(saved)
    assert space.swap_out_sequence(second) is not None


def test_without_a_budget_nothing_is_saved() -> None:
    pool = make_pool()
    space = make_space(pool, blocks=0)
    assert space.swap_out_sequence(holding(pool, 1)) is None
    assert (space.budget_bytes, space.used_bytes, space.round_trip_s(100)) == (0, 0, 0.0)


def test_a_sequence_that_holds_too_little_is_refused_and_the_copy_stays() -> None:
    pool = make_pool()
    space = make_space(pool)
    kv = holding(pool, 20)
    before = bits(pool.storage, kv)
    saved = save(space, kv)
    kv.reset()
    assert kv.reserve(16)
    with pytest.raises(ValueError, match="20 slots"):
        space.swap_in_sequence(saved, kv)
    assert kv.reserve(20)
    space.swap_in_sequence(saved, kv)
    assert torch.equal(bits(pool.storage, kv), before)


def test_what_copies_take_is_known_from_the_start() -> None:
    pool = make_pool()
    space = make_space(pool)
    assert 0.0 < space.round_trip_s(4) < space.round_trip_s(8) < 1.0


def test_positions_come_back() -> None:
    pool = make_pool()
    space = make_space(pool)
    kv = pool.new_sequence()
    assert kv.reserve(8)
    kv.begin(torch.tensor([3, 5, 9]))
    kv.commit([0, 1, 2])
    saved = save(space, kv)
    kv.reset()
    assert kv.reserve(8)
    kv.begin(torch.tensor([1, 1, 1, 1]))
    kv.reset()
    assert kv.reserve(8)
    space.swap_in_sequence(saved, kv)
    assert kv.positions(0, 3).tolist() == [3, 5, 9]
