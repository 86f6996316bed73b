"""KV cache: one pool of fixed-size blocks that holds the keys and values of many sequences.

Shapes: L layers, G key/value heads, S slots (blocks x tokens a block), d head dimension. The pool
is one tensor [2, L, G, S, d] (keys, then values), so that a commit moves all layers in one call. A
sequence allocates blocks as it grows and may free them all and start again. On a CPU it occupies
one extent wherever one is long enough, and moves where it cannot grow in place: then every read is
a view. A fragmented sequence reads by a gather, which costs about as much as one move every round.
A GPU reads through block tables: blocks never move, any free block will do, and sequences with a
common prefix may share its blocks.
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
        """Who holds which block, and which are kept when nobody does."""
        slots = num_blocks * block_tokens
        self.storage = torch.zeros(
            (2, num_layers, num_kv_heads, slots, head_dim), dtype=dtype, device=device
        )
        """[2, L, G, S, d]; zeroed, so that an unwritten slot can never be a NaN."""

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.ledger.free

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self.ledger.total

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` slots."""
        return -(-num_tokens // self.block_tokens)

    def use_block_tables(self, by_tables: bool = True) -> None:
        """From here on blocks are named by tables on a device, so that no sequence moves; or not
        any more."""
        self.ledger.use_block_tables(by_tables)

    def new_sequence(self) -> KVSequence:
        """A sequence without blocks; see `KVSequence.reserve`."""
        return KVSequence(self)

    def allocate(self, max_tokens: int) -> KVSequence:
        """A sequence that holds the blocks of `max_tokens` slots and will not need more.

        Count the rows of the largest draft tree in: rows are written before they are committed.
        Raises ResourceExhaustedError when the free blocks do not suffice.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        sequence = self.new_sequence()
        sequence._append(self.ledger.allocate_blocks(self.blocks_for(max_tokens)))
        return sequence


class KVSequence:
    """Slots of one sequence: `len` committed ones, then those of the last forward."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self._len = 0
        self._pending = 0
        self._released = False
        self.capacity = 0
        """Slots of the blocks held."""
        self.start: int | None = None
        """First slot if all slots are one extent, else None."""
        # A device's rounds know a sequence by its blocks alone; making these would wait for the
        # device.
        self._slots: Tensor | None = None
        """Pool slots in order, int64, of the first `_told` blocks of a fragmented sequence."""
        self._told = 0
        """Blocks whose slots `_slots` holds."""
        self._positions: Tensor | None = None
        """int64 [>= capacity]: absolute position of the token in each slot."""

    @property
    def len(self) -> int:
        """Committed tokens."""
        return self._len

    def __len__(self) -> int:
        return self._len

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    @property
    def is_released(self) -> bool:
        """Whether the blocks went back to the pool for good."""
        return self._released

    @property
    def blocks(self) -> Sequence[int]:
        """Pool blocks in order."""
        return self._blocks

    # ---- blocks --------------------------------------------------------------------------------

    def blocks_missing(self, slots: int) -> int:
        """Blocks that `reserve` would have to take."""
        return max(0, self._pool.blocks_for(slots) - len(self._blocks))

    def reserve(self, slots: int) -> bool:
        """Hold blocks for at least `slots` slots; False, and nothing is changed, if too few are
        free. Not to be called while something else reads or writes the sequence."""
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
        """Hold blocks for at least `slots` slots, of which the first are as in these blocks, all of
        them full, that are kept or held by others: the blocks themselves where they are named by
        tables, else copies. False, and nothing is changed, if too few are free. Only of a sequence
        that holds none."""
        self._check_held()
        if self._blocks:
            raise ValueError(f"the sequence holds {len(self._blocks)} blocks")
        ledger, count = self._pool.ledger, len(filled) * self._pool.block_tokens
        # Nobody may have them while the others are taken.
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
        """Give all blocks back and forget everything; the sequence may be used again."""
        blocks, self._blocks = self._blocks, []
        self._len = self._pending = self.capacity = self._told = 0
        self.start = None
        if blocks:
            self._pool.ledger.release_refs(blocks)

    def release(self) -> None:
        """Give the blocks back for good. Idempotent."""
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
        """Go on in an extent that was taken; what is written, if not committed, goes along."""
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
        self._blocks, self._told = [], 0
        self._append(extent)

    def _copy_from(self, filled: Sequence[int]) -> None:
        """The first slots become those of these blocks."""
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
        """Whether this one of the blocks, and ours, lie behind the ones before them."""
        return all(each[place] == each[place - 1] + 1 for each in (filled, self._blocks))

    def _check_held(self) -> None:
        if self._released:
            raise ValueError("the sequence was released")

    # ---- rows ----------------------------------------------------------------------------------

    def begin(self, positions: Tensor) -> None:
        """Announce rows [N] to be written at slots len .. len+N; what was pending is dropped."""
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
        """Absolute position of the tokens in slots start .. end, int64."""
        return self._all_positions()[start:end]

    def slots(self, start: int, end: int) -> Tensor:
        """Indices into the pool of slots start .. end of this sequence, int64."""
        device = self._pool.storage.device
        if self.start is not None:
            return torch.arange(self.start + start, self.start + end, device=device)
        known = self._slots = _with_capacity(self._slots, self.capacity, device)
        size, blocks = self._pool.block_tokens, self._blocks[self._told :]
        if blocks:
            firsts = torch.tensor(blocks, device=device)[:, None] * size
            added = (firsts + torch.arange(size, device=device)).flatten()
            known[self._told * size : self.capacity] = added
            self._told = len(self._blocks)
        return known[start:end]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward (0-based, ascending), compacted; drop the others."""
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
        """`count` more slots are committed: a device wrote them and made them contiguous."""
        if self._len + count > self.capacity:
            raise ValueError(f"{count} slots after {self._len} of {self.capacity}")
        self._len, self._pending = self._len + count, 0

    def truncate(self, length: int) -> None:
        """Forget everything from slot `length` on."""
        if not 0 <= length <= self._len:
            raise ValueError(f"length must be within 0..{self._len}, not {length}")
        self._len, self._pending = length, 0

    def save_positions(self) -> Tensor | None:
        """A copy of the committed slots' positions, if the host keeps any."""
        return None if self._positions is None else self._positions[: self._len].clone()

    def restore(self, length: int, positions: Tensor | None) -> None:
        """The first `length` slots of an empty sequence were written from a copy; `positions`: what
        `save_positions` gave. Raises ValueError if they do not fit."""
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
    """`held` int64 if it has `size` elements, else a longer copy; doubling, so that a sequence that
    grows copies each element a few times in all."""
    if held is not None and held.shape[0] >= size:
        return held
    # Tensors made in inference mode could be written in that mode only.
    with torch.inference_mode(False):
        length = size if held is None else max(size, 2 * held.shape[0])
        larger = torch.zeros(length, dtype=torch.int64, device=device)
        if held is not None:
            larger[: held.shape[0]] = held
        return larger
