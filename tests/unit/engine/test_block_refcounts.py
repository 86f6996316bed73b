"""Blocks that several sequences hold, and those that are kept when nobody does."""

from __future__ import annotations

import random

import pytest

from outrider.engine.block_allocator import BlockAllocator, FreeBlockStack
from outrider.engine.block_refcounts import LOW_FREE_BLOCKS_FACTOR, BlockRefCounts
from outrider.errors import ResourceExhaustedError

TOTAL = 12


def ledger_of(*, by_tables: bool, evicted: list[int] | None = None) -> BlockRefCounts:
    free = FreeBlockStack(TOTAL, range(TOTAL)) if by_tables else BlockAllocator(TOTAL)
    ledger = BlockRefCounts(free)
    if evicted is not None:
        ledger.evicted = evicted.append
    return ledger


@pytest.mark.parametrize("by_tables", [True, False])
def test_a_block_is_free_when_the_last_who_held_it_gave_it_back(by_tables: bool) -> None:
    ledger = ledger_of(by_tables=by_tables)
    blocks = ledger.allocate_blocks(3)
    ledger.add_refs(blocks[:2])
    assert ledger.shared_blocks(blocks) == blocks[:2]
    ledger.release_refs(blocks)
    assert ledger.free == TOTAL - 2
    ledger.release_refs(blocks[:2])
    assert ledger.free == TOTAL
    with pytest.raises(AssertionError, match="is free already"):
        ledger.release_refs(blocks[:1])


@pytest.mark.parametrize("by_tables", [True, False])
def test_kept_blocks_count_as_free_and_go_last_those_kept_longest_first(by_tables: bool) -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=by_tables, evicted=evicted)
    first, second = ledger.allocate_blocks(2), ledger.allocate_blocks(2)
    for block in (*first, *second):
        ledger.retain_block(block)
    ledger.release_refs(second)
    ledger.release_refs(first)
    assert ledger.free == TOTAL and not evicted
    others = ledger.allocate_blocks(TOTAL - 4)
    assert not evicted and not {*first, *second} & {*others}
    # Of a prefix the end goes before its beginning.
    taken = [ledger.allocate_blocks(1)[0] for _ in range(4)]
    assert taken == evicted == [second[1], second[0], first[1], first[0]]
    assert ledger.free == 0
    with pytest.raises(ResourceExhaustedError, match="1 KV blocks are needed, 0 of 12"):
        ledger.allocate_blocks(1)


def test_a_kept_block_that_somebody_holds_is_never_taken() -> None:
    ledger = ledger_of(by_tables=True)
    mine = ledger.allocate_blocks(2)
    ledger.retain_block(mine[0])
    ledger.release_refs(mine)
    ledger.add_refs(mine[:1])
    assert ledger.free == TOTAL - 1
    assert mine[0] not in ledger.allocate_blocks(TOTAL - 1)
    ledger.release_refs(mine[:1])
    assert ledger.free == 1 and ledger.allocate_blocks(1) == mine[:1]


def test_a_block_that_is_kept_no_longer_is_given_back_without_a_word() -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=True, evicted=evicted)
    held, idle = ledger.allocate_blocks(1), ledger.allocate_blocks(1)
    for block in (*held, *idle):
        ledger.retain_block(block)
    ledger.release_refs(idle)
    ledger.release_block(idle[0])
    ledger.release_block(held[0])
    ledger.release_refs(held)
    assert ledger.free == len(ledger.allocate_blocks(TOTAL)) == TOTAL
    assert not evicted


def test_who_grows_in_place_takes_kept_blocks_that_lie_there_and_none_that_are_held() -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=False, evicted=evicted)
    mine, kept, held = (
        ledger.allocate_blocks(2),
        ledger.allocate_blocks(2),
        ledger.allocate_blocks(1),
    )
    for block in kept:
        ledger.retain_block(block)
    assert not ledger.allocate_next(2, 2)
    ledger.release_refs(kept)
    assert not ledger.allocate_next(2, 3)
    assert not evicted
    assert ledger.allocate_next(2, 2)
    assert sorted(evicted) == kept == [2, 3]
    ledger.release_refs([*mine, *kept, *held])
    assert not ledger.allocate_next(TOTAL - 1, 2)
    assert ledger.free == TOTAL


def test_where_sequences_lie_in_one_piece_what_is_kept_leaves_them_room() -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=False, evicted=evicted)
    blocks = ledger.allocate_blocks(TOTAL)
    for block in blocks:
        ledger.retain_block(block)
    ledger.release_refs(blocks)
    assert len(evicted) == TOTAL - TOTAL // LOW_FREE_BLOCKS_FACTOR
    # No room is left in one piece: the rest goes, too.
    assert ledger.allocate_contiguous(TOTAL) == range(TOTAL)
    assert len(evicted) == TOTAL


def test_room_in_one_piece_costs_the_fewest_kept_blocks_and_none_where_there_is_no_such_room() -> (
    None
):
    evicted: list[int] = []
    ledger = ledger_of(by_tables=False, evicted=evicted)
    blocks = ledger.allocate_blocks(TOTAL)
    for block in (1, 2, 5, 9):
        ledger.retain_block(block)
    # Nobody holds 1 to 3, 5 to 7 and 9.
    ledger.release_refs([1, 2, 3, 5, 6, 7, 9])
    assert ledger.allocate_contiguous(4) is None and not evicted
    assert ledger.allocate_contiguous(3) == range(5, 8) and evicted == [5]
    assert ledger.allocate_contiguous(3) == range(1, 4) and sorted(evicted) == [1, 2, 5]
    assert ledger.free == 1 and blocks[9] == 9


@pytest.mark.parametrize("by_tables", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_holders_never_have_one_block_by_chance(by_tables: bool, seed: int) -> None:
    rng = random.Random(seed)
    kept: set[int] = set()
    ledger = ledger_of(by_tables=by_tables)
    ledger.evicted = kept.remove
    holders: list[list[int]] = []
    for _ in range(400):
        held = [block for blocks in holders for block in blocks]
        what = rng.randrange(4)
        if what == 0 and ledger.free:
            blocks = ledger.allocate_blocks(rng.randint(1, ledger.free))
            assert not {*blocks} & {*held} and not {*blocks} & kept
            holders.append(blocks)
        elif what == 1 and holders:
            ledger.release_refs(holders.pop(rng.randrange(len(holders))))
        elif what == 2 and held:
            block = rng.choice(held)
            ledger.retain_block(block)
            kept.add(block)
        elif what == 3 and kept:
            blocks = rng.sample(sorted(kept), rng.randint(1, len(kept)))
            ledger.add_refs(blocks)
            holders.append(blocks)
        held = [block for blocks in holders for block in blocks]
        assert ledger.free == TOTAL - len({*held})
        assert ledger.shared_blocks(range(TOTAL)) == [b for b in range(TOTAL) if held.count(b) > 1]


def test_what_names_blocks_can_change_while_some_are_kept() -> None:
    ledger = ledger_of(by_tables=False)
    mine, kept = ledger.allocate_blocks(2), ledger.allocate_blocks(2)
    ledger.retain_block(kept[0])
    ledger.release_refs(kept)
    ledger.use_block_tables(True)
    assert ledger.uses_block_tables and ledger.free == TOTAL - 2
    assert not {*ledger.allocate_blocks(TOTAL - 2)} & {*mine}
