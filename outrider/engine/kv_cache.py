"""KV cache: one pool of fixed-size blocks that holds the keys and values of many sequences.

Shapes: L layers, G key/value heads, S slots (blocks x tokens per block), d head dimension. The pool
is one tensor [2, L, G, S, d] (keys, then values), so that one call moves the slots of all layers. A
sequence allocates blocks as it grows; it may free all of them and start again.

On a CPU a sequence occupies contiguous blocks if a long enough extent is free, and moves to another
extent if it cannot grow in place. Reads of a contiguous sequence are views; a fragmented sequence
is read by a gather, which costs about as much as moving it every round. A GPU reads through block
tables: blocks never move, any free block will do, and sequences with a common prefix can share its
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.block_allocator import BlockAllocator
from outrider.engine.block_refcounts import BlockRefCounts
from outrider.errors import ResourceExhaustedError


class KVPool:
    """Block pool that stores the keys and values of all sequences of one model."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens = block_tokens
        self.ledger = BlockRefCounts(BlockAllocator(num_blocks))
        """Reference counts of the blocks, and the cached blocks that no sequence holds."""
        slots = num_blocks * block_tokens
        self.storage = torch.zeros(
            (2, num_layers, num_kv_heads, slots, head_dim), dtype=dtype, device=device
        )
        """Keys and values, [2, L, G, S, d]. Zeroed at the start, so that an unwritten slot never
        holds NaN."""

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds, including cached blocks."""
        return self.ledger.free

    @property
    def total_blocks(self) -> int:
        """Number of blocks of the pool."""
        return self.ledger.total

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that are needed for `num_tokens` slots."""
        return -(-num_tokens // self.block_tokens)

    def use_block_tables(self, by_tables: bool = True) -> None:
        """Set whether the device reads blocks through block tables. With block tables, sequences
        never move and may use blocks in any order."""
        self.ledger.use_block_tables(by_tables)

    def new_sequence(self) -> KVSequence:
        """Return a new sequence without blocks; `KVSequence.reserve` allocates them."""
        return KVSequence(self)

    def allocate(self, max_tokens: int) -> KVSequence:
        """Return a new sequence whose blocks for `max_tokens` slots are allocated already.

        `max_tokens` must include the rows of the largest draft tree, because rows are written
        before they are committed. Raises ResourceExhaustedError if too few blocks are free.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        sequence = self.new_sequence()
        sequence._append(self.ledger.allocate_blocks(self.blocks_for(max_tokens)))
        return sequence


class KVSequence:
    """The slots of one sequence: `len` committed slots, then the uncommitted rows of the last
    forward pass."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self._len = 0
        self._pending = 0
        self._released = False
        self.capacity = 0
        """Number of slots in the sequence's blocks."""
        self.start: int | None = None
        """Index in the pool of the first slot if all slots are contiguous, else None."""
        # Created on first use: rounds on a device need only the block numbers, and creating these
        # tensors would wait for the device.
        self._slots: Tensor | None = None
        """Pool indices of the slots of the first `_num_indexed` blocks, in order, int64; used while
        the sequence is fragmented."""
        self._num_indexed = 0
        """Number of blocks whose slots are in `_slots`."""
        self._positions: Tensor | None = None
        """Absolute position of the token in each slot, int64 [>= capacity]."""

    @property
    def len(self) -> int:
        """Number of committed tokens."""
        return self._len

    def __len__(self) -> int:
        return self._len

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequence holds."""
        return len(self._blocks)

    @property
    def is_released(self) -> bool:
        """Whether `release` was called; a released sequence cannot be used again."""
        return self._released

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the sequence's blocks, in the order of their tokens."""
        return self._blocks

    # ---- blocks --------------------------------------------------------------------------------

    def blocks_missing(self, slots: int) -> int:
        """Return the number of blocks that `reserve(slots)` would have to allocate."""
        return max(0, self._pool.blocks_for(slots) - len(self._blocks))

    def reserve(self, slots: int) -> bool:
        """Allocate blocks until the sequence has at least `slots` slots.

        Returns False, and changes nothing, if too few blocks are free. Must not be called while
        another thread reads or writes the sequence.
        """
        self._check_held()
        missing = self.blocks_missing(slots)
        if not missing:
            return True
        ledger = self._pool.ledger
        if missing > ledger.free:
            return False
        if ledger.uses_block_tables:
            self._append(ledger.allocate_blocks(missing))
        elif self.start is not None and ledger.allocate_next(self._blocks[-1] + 1, missing):
            first = self._blocks[-1] + 1
            self._append(range(first, first + missing))
        elif (extent := ledger.allocate_contiguous(len(self._blocks) + missing)) is not None:
            self._move_to(extent)
        else:
            self._append(ledger.allocate_blocks(missing))
        return True

    def attach_blocks(self, filled: Sequence[int], slots: int) -> bool:
        """Allocate at least `slots` slots, the first of which hold the tokens of the blocks
        `filled`.

        `filled` are full blocks that the prefix cache or other sequences hold. With block tables
        the sequence shares them; otherwise their content is copied. Returns False, and changes
        nothing, if too few blocks are free. Raises ValueError if the sequence already holds blocks.
        """
        self._check_held()
        if self._blocks:
            raise ValueError(f"the sequence holds {len(self._blocks)} blocks")
        ledger, count = self._pool.ledger, len(filled) * self._pool.block_tokens
        # The references keep the blocks from eviction while the other blocks are allocated.
        ledger.add_refs(filled)
        if ledger.uses_block_tables:
            self._append(filled)
            if not self.reserve(slots):
                self.reset()
                return False
            self.restore(count, None)
            return True
        held = self.reserve(max(slots, count))
        if held:
            self._copy_from(filled)
            self.restore(count, torch.arange(count, device=self._pool.storage.device))
        ledger.release_refs(filled)
        return held

    def reset(self) -> None:
        """Free all blocks and drop all tokens; the sequence can be used again."""
        blocks, self._blocks = self._blocks, []
        self._len = self._pending = self.capacity = self._num_indexed = 0
        self.start = None
        if blocks:
            self._pool.ledger.release_refs(blocks)

    def release(self) -> None:
        """Free all blocks for good: the sequence cannot be used again. Idempotent."""
        self.reset()
        self._released = True
        self._slots = self._positions = None

    def _append(self, blocks: Sequence[int]) -> None:
        joined = not self._blocks or (self.start is not None and blocks[0] == self._blocks[-1] + 1)
        in_order = blocks[-1] - blocks[0] + 1 == len(blocks) and list(blocks) == sorted(blocks)
        self._blocks.extend(blocks)
        self.capacity = len(self._blocks) * self._pool.block_tokens
        first = self._blocks[0] * self._pool.block_tokens
        self.start = first if joined and in_order else None

    def _move_to(self, extent: range) -> None:
        """Move the sequence, including its uncommitted rows, to an extent of blocks that is
        allocated already."""
        used, start = self._len + self._pending, extent.start * self._pool.block_tokens
        if used:
            with torch.inference_mode():
                storage = self._pool.storage
                there = storage.narrow(3, start, used)
                if self.start is not None:
                    there.copy_(storage.narrow(3, self.start, used))
                else:
                    there.copy_(storage.index_select(3, self.slots(0, used)))
        if self._blocks:
            self._pool.ledger.release_refs(self._blocks)
        self._blocks, self._num_indexed = [], 0
        self._append(extent)

    def _copy_from(self, filled: Sequence[int]) -> None:
        """Copy the content of these blocks into the first slots of the sequence."""
        storage, size = self._pool.storage, self._pool.block_tokens
        place = 0
        while place < len(filled):
            count = 1
            while place + count < len(filled) and self._follow(filled, place + count):
                count += 1
            to, source = self._blocks[place] * size, filled[place] * size
            with torch.inference_mode():
                storage.narrow(3, to, count * size).copy_(storage.narrow(3, source, count * size))
            place += count

    def _follow(self, filled: Sequence[int], place: int) -> bool:
        """Return whether the blocks at `place - 1` and `place` are neighbours in the pool, both in
        `filled` and in this sequence's blocks."""
        return all(each[place] == each[place - 1] + 1 for each in (filled, self._blocks))

    def _check_held(self) -> None:
        if self._released:
            raise ValueError("the sequence was released")

    # ---- rows ----------------------------------------------------------------------------------

    def begin(self, positions: Tensor) -> None:
        """Begin a forward pass that writes N rows to the slots from `len` on. `positions` are their
        absolute positions, int64 [N].

        Rows that were written before but not committed are dropped. Raises ResourceExhaustedError
        if the sequence has too few slots.
        """
        end = self._len + positions.shape[0]
        self._check_held()
        if end > self.capacity:
            raise ResourceExhaustedError(
                f"{end} slots are needed, the sequence holds {self.capacity}",
                reason="KV_SEQUENCE_FULL",
            )
        self._pending = positions.shape[0]
        self._all_positions()[self._len : end] = positions

    def positions(self, start: int, end: int) -> Tensor:
        """Return the absolute positions of the tokens in slots start .. end (exclusive), int64."""
        return self._all_positions()[start:end]

    def slots(self, start: int, end: int) -> Tensor:
        """Return the pool indices of the sequence's slots start .. end (exclusive), int64."""
        device = self._pool.storage.device
        if self.start is not None:
            return torch.arange(self.start + start, self.start + end, device=device)
        known = self._slots = _with_capacity(self._slots, self.capacity, device)
        size, blocks = self._pool.block_tokens, self._blocks[self._num_indexed :]
        if blocks:
            firsts = torch.tensor(blocks, device=device)[:, None] * size
            added = (firsts + torch.arange(size, device=device)).flatten()
            known[self._num_indexed * size : self.capacity] = added
            self._num_indexed = len(self._blocks)
        return known[start:end]

    def commit(self, rows: Sequence[int]) -> None:
        """Commit some rows of the last forward pass and drop its other rows.

        `rows` are 0-based and ascending. Their keys and values are moved so that all committed
        slots are contiguous. Raises ValueError for rows that are out of range or not ascending.
        """
        if rows and rows[-1] >= self._pending:
            raise ValueError(f"row {rows[-1]} is not one of the {self._pending} rows written last")
        self._check_held()
        if any(b <= a for a, b in zip((-1, *rows), rows, strict=False)):
            raise ValueError(f"rows must be ascending and not negative, not {list(rows)}")
        start = self._len
        moved = [(start + to, start + row) for to, row in enumerate(rows) if to != row]
        if moved:
            self._move([to for to, _ in moved], [source for _, source in moved])
        self._len, self._pending = start + len(rows), 0

    def advance(self, count: int) -> None:
        """Commit the next `count` slots, which a device has already written contiguously. Raises
        ValueError if the sequence has fewer slots."""
        if self._len + count > self.capacity:
            raise ValueError(f"{count} slots after {self._len} of {self.capacity}")
        self._len, self._pending = self._len + count, 0

    def truncate(self, length: int) -> None:
        """Drop all tokens from slot `length` on. Raises ValueError if fewer tokens are
        committed."""
        if not 0 <= length <= self._len:
            raise ValueError(f"length must be within 0..{self._len}, not {length}")
        self._len, self._pending = length, 0

    def save_positions(self) -> Tensor | None:
        """Return a copy of the positions of the committed tokens, for `restore`. Return None if the
        host does not store positions for this sequence."""
        return None if self._positions is None else self._positions[: self._len].clone()

    def restore(self, length: int, positions: Tensor | None) -> None:
        """Commit the first `length` slots of an empty sequence. The caller copies their content,
        before or after this call.

        `positions` is the result of `save_positions`. Raises ValueError if the sequence is not
        empty or has too few slots.
        """
        if self._len or self._pending:
            raise ValueError(f"the sequence holds {self._len} tokens")
        self.advance(length)
        if positions is not None:
            self._all_positions()[:length] = positions

    def _all_positions(self) -> Tensor:
        held = _with_capacity(self._positions, self.capacity, self._pool.storage.device)
        self._positions = held
        return held

    def _move(self, to: list[int], source: list[int]) -> None:
        # index_select copies first, so overlapping moves are safe.
        storage, held = self._pool.storage, self._all_positions()
        to_slots, from_slots = torch.tensor([to, source], device=storage.device).unbind()
        held[to_slots] = held[from_slots]
        if self.start is not None:
            to_slots, from_slots = to_slots + self.start, from_slots + self.start
        else:
            slots = self.slots(0, self.capacity)
            to_slots, from_slots = slots[to_slots], slots[from_slots]
        storage.index_copy_(3, to_slots, storage.index_select(3, from_slots))


def _with_capacity(held: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return `held` (int64) if it has at least `size` elements, else a longer copy. The length at
    least doubles, so that a growing tensor copies each element only a few times."""
    if held is not None and held.shape[0] >= size:
        return held
    # Tensors made in inference mode can be written in that mode only.
    with torch.inference_mode(False):
        length = size if held is None else max(size, 2 * held.shape[0])
        larger = torch.zeros(length, dtype=torch.int64, device=device)
        if held is not None:
            larger[: held.shape[0]] = held
        return larger
