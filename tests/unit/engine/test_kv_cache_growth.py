"""Sequences that take blocks as they grow, move and begin anew: invariants under any order."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.engine.block_allocator import BlockAllocator
from outrider.engine.kv_cache import KVPool, KVSequence
from tests.unit.engine.test_kv_cache import make_pool, stored, write

BLOCKS = 24


class Sequences(RuleBasedStateMachine):
    """What each sequence holds is what was written to it, whatever the others do."""

    @initialize(by_tables=st.booleans())
    def begin(self, by_tables: bool) -> None:
        self.pool: KVPool = make_pool(num_blocks=BLOCKS, block_tokens=2)
        self.by_tables = by_tables
        if by_tables:
            self.pool.use_block_tables()
        self.held: list[KVSequence] = []
        self.labels: dict[int, list[int]] = {}
        self.next = 1

    def _pick(self, data: st.DataObject) -> KVSequence:
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @precondition(lambda self: len(self.held) < 6)
    @rule(whole=st.booleans(), slots=st.integers(1, 9))
    def create(self, whole: bool, slots: int) -> None:
        fits = self.pool.blocks_for(slots) <= self.pool.free_blocks
        sequence = self.pool.allocate(slots) if whole and fits else self.pool.new_sequence()
        self.held.append(sequence)
        self.labels[id(sequence)] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), slots=st.integers(0, 2 * BLOCKS + 4))
    def reserve(self, data: st.DataObject, slots: int) -> None:
        sequence, free = self._pick(data), self.pool.free_blocks
        missing, before = sequence.blocks_missing(slots), list(sequence.blocks)
        assert missing == max(0, -(-slots // 2) - sequence.num_blocks)
        assert sequence.reserve(slots) is (missing <= free)
        if missing > free:
            assert (list(sequence.blocks), self.pool.free_blocks) == (before, free)
        else:
            assert sequence.num_blocks == len(before) + missing
            assert self.pool.free_blocks == free - missing
        if self.by_tables:
            assert list(sequence.blocks[: len(before)]) == before

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 6))
    def write_and_commit(self, data: st.DataObject, count: int) -> None:
        sequence = self._pick(data)
        if sequence.len + count > sequence.capacity:
            return
        labels = list(range(self.next, self.next + count))
        self.next += count
        write(sequence, self.pool, labels)
        if data.draw(st.booleans()):
            # Blocks may be added between a forward and its commit.
            sequence.reserve(sequence.capacity + 1)
        rows = sorted(data.draw(st.sets(st.integers(0, count - 1))))
        sequence.commit(rows)
        self.labels[id(sequence)] += [labels[row] for row in rows]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        sequence = self._pick(data)
        sequence.reset()
        assert (sequence.len, sequence.num_blocks, sequence.capacity) == (0, 0, 0)
        assert not sequence.is_released
        self.labels[id(sequence)] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self._pick(data)
        sequence.release()
        assert sequence.is_released
        self.held.remove(sequence)

    @invariant()
    def nothing_overlaps_or_leaks(self) -> None:
        if not hasattr(self, "held"):
            return
        blocks = [block for sequence in self.held for block in sequence.blocks]
        assert len(set(blocks)) == len(blocks) == BLOCKS - self.pool.free_blocks

    @invariant()
    def everybody_has_what_was_written(self) -> None:
        for sequence in getattr(self, "held", []):
            assert stored(sequence, self.pool) == self.labels[id(sequence)]
            slots = sequence.slots(0, sequence.capacity).tolist()
            assert slots == [2 * block + n for block in sequence.blocks for n in range(2)]
            in_order = slots == list(range(slots[0], slots[0] + len(slots))) if slots else False
            assert (sequence.start is not None) is in_order
            if in_order:
                assert sequence.start == slots[0]


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=30)


def test_a_sequence_grows_in_place_while_it_has_room() -> None:
    pool = make_pool(num_blocks=64, block_tokens=2)
    sequences = [pool.new_sequence() for _ in range(4)]
    for slots in range(2, 14):
        for sequence in sequences:
            assert sequence.reserve(slots)
            assert sequence.start is not None
    firsts = [sequence.start for sequence in sequences]
    for sequence in sequences:
        sequence.reserve(16)
    assert [sequence.start for sequence in sequences] == firsts


def test_a_sequence_that_cannot_grow_in_place_moves_with_what_is_written() -> None:
    pool = make_pool(num_blocks=16, block_tokens=2)
    sequence = pool.new_sequence()
    assert sequence.reserve(4)
    write(sequence, pool, [1, 2, 3])
    sequence.commit([0, 1])
    write(sequence, pool, [7])
    assert pool.ledger.allocate_next(sequence.blocks[-1] + 1, 1), "somebody else's"
    before = sequence.start
    assert sequence.reserve(2 * 4)
    assert sequence.start not in (None, before)
    sequence.commit([0])
    assert stored(sequence, pool) == [1, 2, 7]
    assert pool.free_blocks == 16 - 4 - 1


def test_tables_name_blocks_that_stay_where_they_are() -> None:
    pool = make_pool(num_blocks=8)
    pool.use_block_tables()
    assert pool.ledger.uses_block_tables
    first, second = pool.new_sequence(), pool.new_sequence()
    for slots in (4, 8, 12):
        before = [list(first.blocks), list(second.blocks)]
        assert first.reserve(slots) and second.reserve(slots)
        assert list(first.blocks[:-1]) == before[0] and list(second.blocks[:-1]) == before[1]
    pool.use_block_tables()
    assert pool.free_blocks == 2
    first.release()
    pool.use_block_tables(False)
    assert not pool.ledger.uses_block_tables
    assert pool.free_blocks == 5
    second.release()
    assert pool.allocate(32).start == 0


def test_new_sequences_leave_their_neighbours_room() -> None:
    allocator = BlockAllocator(64)
    first, second, third = (
        allocator.allocate_contiguous(4),
        allocator.allocate_contiguous(4),
        allocator.allocate_contiguous(4),
    )
    assert first == range(4)
    assert second is not None and second.start - 4 >= 24
    assert third is not None and min(abs(third.start - 4), abs(third.start - second.stop)) >= 10
    assert allocator.allocate_next(4, 10)
    assert not allocator.allocate_next(4, 1)
    assert not allocator.allocate_next(second.start - 1, 2)
    assert allocator.free == 64 - 12 - 10


def test_positions_and_slots_follow_growth() -> None:
    pool = make_pool(num_blocks=8, block_tokens=2)
    sequence = pool.new_sequence()
    for label in range(10):
        assert sequence.reserve(label + 1)
        write(sequence, pool, [label])
        sequence.commit([0])
    assert sequence.positions(0, 10).tolist() == list(range(10))
    assert torch.equal(sequence.slots(0, 10), torch.arange(10))
