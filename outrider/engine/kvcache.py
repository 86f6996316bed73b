"""Key/value storage of many sequences in one pool of fixed-size blocks.

Shapes: L layers, G key/value heads, S slots (blocks x tokens a block), d head dimension. The pool
is one tensor [2, L, G, S, d] (keys, then values), so that a commit moves all layers in one call.
All blocks that a sequence may need are reserved at its start: a running session can never meet an
empty pool. Blocks are taken as one extent where a long enough one is free; then every read is a
view. A fragmented sequence reads by a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from outrider.errors import ResourceExhaustedError


class BlockAllocator:
    """Which blocks are free; hands out contiguous extents where it can. No tensors."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.total = num_blocks
        self._extents: list[tuple[int, int]] = [(0, num_blocks)]
        """Free extents (start, end), sorted, never adjacent."""

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return sum(end - start for start, end in self._extents)

    def take(self, count: int) -> list[int]:
        """Remove `count` free blocks: the smallest extent that holds them all, else the largest
        extents first. Raises ResourceExhaustedError when fewer are free."""
        if count > self.free:
            raise ResourceExhaustedError(
                f"{count} KV blocks are needed, {self.free} of {self.total} are free",
                reason="KV_BLOCKS_EXHAUSTED",
            )
        fitting = [e for e in self._extents if e[1] - e[0] >= count]
        if fitting:
            order = [min(fitting, key=lambda e: (e[1] - e[0], e[0]))]
        else:
            order = sorted(self._extents, key=lambda e: (e[0] - e[1], e[0]))
        taken: list[int] = []
        for start, end in order:
            stop = min(end, start + count - len(taken))
            taken.extend(range(start, stop))
            self._extents.remove((start, end))
            if stop < end:
                self._extents.append((stop, end))
            if len(taken) == count:
                break
        self._extents.sort()
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Return blocks. A block that is free already is a bug of the caller."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._extents, *((b, b + 1) for b in blocks)]):
            assert not merged or start >= merged[-1][1], f"block {start} is free already"
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._extents = merged


class KVPool:
    """The blocks of every sequence of one model."""

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
        self._allocator = BlockAllocator(num_blocks)
        slots = num_blocks * block_tokens
        self.storage = torch.zeros(
            (2, num_layers, num_kv_heads, slots, head_dim), dtype=dtype, device=device
        )
        """[2, L, G, S, d]; zeroed, so that an unwritten slot can never be a NaN."""

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._allocator.free

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self._allocator.total

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that a sequence of up to `num_tokens` slots reserves."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, max_tokens: int) -> KVSequence:
        """Reserve every block that a sequence of up to `max_tokens` slots needs.

        Count the rows of the largest draft tree in: rows are written before they are committed.
        Raises ResourceExhaustedError when the free blocks do not suffice.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        return KVSequence(self, self._allocator.take(self.blocks_for(max_tokens)))

    def _give(self, blocks: Sequence[int]) -> None:
        self._allocator.give(blocks)


class KVSequence:
    """The slots of one sequence: `len` committed ones, then those of the last forward."""

    def __init__(self, pool: KVPool, blocks: Sequence[int]) -> None:
        self._pool = pool
        self._blocks: Sequence[int] = blocks
        self._len = 0
        self._pending = 0
        self.capacity = len(blocks) * pool.block_tokens
        contiguous = blocks[-1] - blocks[0] + 1 == len(blocks) and list(blocks) == sorted(blocks)
        self.start: int | None = blocks[0] * pool.block_tokens if contiguous else None
        """First slot if all slots are one extent, else None."""

    @property
    def len(self) -> int:
        """Committed tokens."""
        return self._len

    def __len__(self) -> int:
        return self._len

    @property
    def num_blocks(self) -> int:
        """Blocks held; 0 after the release."""
        return len(self._blocks)

    @property
    def released(self) -> bool:
        """Whether the blocks went back to the pool."""
        return not self._blocks

    @property
    def blocks(self) -> Sequence[int]:
        """Pool blocks in order; empty after the release."""
        return self._blocks

    def begin(self, positions: Tensor) -> None:
        """Announce rows [N] to be written at slots len .. len+N; what was pending is dropped."""
        end = self._len + positions.shape[0]
        if self.released:
            raise ValueError("the sequence was released")
        if end > self.capacity:
            raise ResourceExhaustedError(
                f"{end} slots are needed, the sequence reserved {self.capacity}",
                reason="KV_SEQUENCE_FULL",
            )
        self._pending = positions.shape[0]
        self._positions[self._len : end] = positions

    def positions(self, start: int, end: int) -> Tensor:
        """Absolute position of the tokens in slots start .. end, int64."""
        return self._positions[start:end]

    # A device's rounds know a sequence by its blocks alone; making these would wait for the device.
    # Tensors made in inference mode could be written in that mode only.

    @cached_property
    def _slots(self) -> Tensor:
        """int64 [capacity]: pool slots in order."""
        size = self._pool.block_tokens
        with torch.inference_mode(False):
            slots = torch.cat([torch.arange(b * size, (b + 1) * size) for b in self._blocks])
            return slots.to(self._pool.storage.device)

    @cached_property
    def _positions(self) -> Tensor:
        """int64 [capacity]: absolute position of the token in each slot."""
        with torch.inference_mode(False):
            return torch.zeros(self.capacity, dtype=torch.int64, device=self._pool.storage.device)

    def slots(self, start: int, end: int) -> Tensor:
        """Indices into the pool of slots start .. end of this sequence, int64."""
        return self._slots[start:end]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward (0-based, ascending), compacted; drop the others."""
        if rows and rows[-1] >= self._pending:
            raise ValueError(f"row {rows[-1]} is not one of the {self._pending} rows written last")
        if self.released:
            raise ValueError("the sequence was released")
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

    def release(self) -> None:
        """Give the blocks back. Idempotent."""
        blocks, self._blocks = self._blocks, ()
        self._len = self._pending = 0
        if blocks:
            self._pool._give(blocks)

    def _move(self, to: list[int], source: list[int]) -> None:
        # index_select copies first, so overlapping moves are safe.
        storage, device = self._pool.storage, self._slots.device
        to_slots, from_slots = torch.tensor([to, source], device=device).unbind()
        storage.index_copy_(
            3, self._slots[to_slots], storage.index_select(3, self._slots[from_slots])
        )
        self._positions[to_slots] = self._positions[from_slots]
