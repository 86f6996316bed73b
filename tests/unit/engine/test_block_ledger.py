"""Blocks that several sequences hold, and those that are kept when nobody does."""

from __future__ import annotations

import random

import pytest

from outrider.engine.block_allocator import BlockAllocator, BlockStack
from outrider.engine.block_refcounts import CROWDED, BlockLedger
from outrider.errors import ResourceExhaustedError

TOTAL = 12


def ledger_of(*, by_tables: bool, evicted: list[int] | None = None) -> BlockLedger:
    free = BlockStack(TOTAL, range(TOTAL)) if by_tables else BlockAllocator(TOTAL)
    ledger = BlockLedger(free)
    if evicted is not None:
        ledger.evicted = evicted.append
    return ledger


@pytest.mark.parametrize("by_tables", [True, False])
def test_a_block_is_free_when_the_last_who_held_it_gave_it_back(by_tables: bool) -> None:
    ledger = ledger_of(by_tables=by_tables)
    blocks = ledger.take(3)
    ledger.hold(blocks[:2])
    assert ledger.shared(blocks) == blocks[:2]
    ledger.give(blocks)
    assert ledger.free == TOTAL - 2
    ledger.give(blocks[:2])
    assert ledger.free == TOTAL
    with pytest.raises(AssertionError, match="is free already"):
        ledger.give(blocks[:1])


@pytest.mark.parametrize("by_tables", [True, False])
def test_kept_blocks_count_as_free_and_go_last_those_kept_longest_first(by_tables: bool) -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=by_tables, evicted=evicted)
    first, second = ledger.take(2), ledger.take(2)
    for block in (*first, *second):
        ledger.keep(block)
    ledger.give(second)
    ledger.give(first)
    assert ledger.free == TOTAL and not evicted
    others = ledger.take(TOTAL - 4)
    assert not evicted and not {*first, *second} & {*others}
    # Of a prefix the end goes before its beginning.
    taken = [ledger.take(1)[0] for _ in range(4)]
    assert taken == evicted == [second[1], second[0], first[1], first[0]]
    assert ledger.free == 0
    with pytest.raises(ResourceExhaustedError, match="1 KV blocks are needed, 0 of 12"):
        ledger.take(1)


def test_a_kept_block_that_somebody_holds_is_never_taken() -> None:
    ledger = ledger_of(by_tables=True)
    mine = ledger.take(2)
    ledger.keep(mine[0])
    ledger.give(mine)
    ledger.hold(mine[:1])
    assert ledger.free == TOTAL - 1
    assert mine[0] not in ledger.take(TOTAL - 1)
    ledger.give(mine[:1])
    assert ledger.free == 1 and ledger.take(1) == mine[:1]


def test_a_block_that_is_kept_no_longer_is_given_back_without_a_word() -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=True, evicted=evicted)
    held, idle = ledger.take(1), ledger.take(1)
    for block in (*held, *idle):
        ledger.keep(block)
    ledger.give(idle)
    ledger.drop(idle[0])
    ledger.drop(held[0])
    ledger.give(held)
    assert ledger.free == len(ledger.take(TOTAL)) == TOTAL
    assert not evicted


def test_who_grows_in_place_takes_kept_blocks_that_lie_there_and_none_that_are_held() -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=False, evicted=evicted)
    mine, kept, held = ledger.take(2), ledger.take(2), ledger.take(1)
    for block in kept:
        ledger.keep(block)
    assert not ledger.extend(2, 2)
    ledger.give(kept)
    assert not ledger.extend(2, 3)
    assert not evicted
    assert ledger.extend(2, 2)
    assert sorted(evicted) == kept == [2, 3]
    ledger.give([*mine, *kept, *held])
    assert not ledger.extend(TOTAL - 1, 2)
    assert ledger.free == TOTAL


def test_where_sequences_lie_in_one_piece_what_is_kept_leaves_them_room() -> None:
    evicted: list[int] = []
    ledger = ledger_of(by_tables=False, evicted=evicted)
    blocks = ledger.take(TOTAL)
    for block in blocks:
        ledger.keep(block)
    ledger.give(blocks)
    assert len(evicted) == TOTAL - TOTAL // CROWDED
    # No room is left in one piece: the rest goes, too.
    assert ledger.place(TOTAL) == range(TOTAL)
    assert len(evicted) == TOTAL


def test_room_in_one_piece_costs_the_fewest_kept_blocks_and_none_where_there_is_no_such_room() -> (
    None
):
    evicted: list[int] = []
    ledger = ledger_of(by_tables=False, evicted=evicted)
    blocks = ledger.take(TOTAL)
    for block in (1, 2, 5, 9):
        ledger.keep(block)
    # Nobody holds 1 to 3, 5 to 7 and 9.
    ledger.give([1, 2, 3, 5, 6, 7, 9])
    assert ledger.place(4) is None and not evicted
    assert ledger.place(3) == range(5, 8) and evicted == [5]
    assert ledger.place(3) == range(1, 4) and sorted(evicted) == [1, 2, 5]
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
            blocks = ledger.take(rng.randint(1, ledger.free))
            assert not {*blocks} & {*held} and not {*blocks} & kept
            holders.append(blocks)
        elif what == 1 and holders:
            ledger.give(holders.pop(rng.randrange(len(holders))))
        elif what == 2 and held:
            block = rng.choice(held)
            ledger.keep(block)
            kept.add(block)
        elif what == 3 and kept:
            blocks = rng.sample(sorted(kept), rng.randint(1, len(kept)))
            ledger.hold(blocks)
            holders.append(blocks)
        held = [block for blocks in holders for block in blocks]
        assert ledger.free == TOTAL - len({*held})
        assert ledger.shared(range(TOTAL)) == [b for b in range(TOTAL) if held.count(b) > 1]


def test_what_names_blocks_can_change_while_some_are_kept() -> None:
    ledger = ledger_of(by_tables=False)
    mine, kept = ledger.take(2), ledger.take(2)
    ledger.keep(kept[0])
    ledger.give(kept)
    ledger.name_by_tables(True)
    assert ledger.by_tables and ledger.free == TOTAL - 2
    assert not {*ledger.take(TOTAL - 2)} & {*mine}
