"""Allocators of free KV blocks: extents for contiguous sequences, a stack for block tables. They do
no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from outrider.errors import ResourceExhaustedError


class BlockAllocator:
    """Allocates KV blocks from extents of free blocks, for sequences that should be contiguous in
    the pool."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.total = num_blocks
        self.free = num_blocks
        """Number of free blocks."""
        self._extents: list[tuple[int, int]] = [(0, num_blocks)]
        """Free extents (start, end), without `end`, in ascending order and never adjacent."""

    @classmethod
    def from_free(cls, total: int, free: Sequence[int]) -> BlockAllocator:
        """Return an allocator of `total` blocks of which the blocks in `free` are free."""
        allocator = cls(total)
        allocator._extents, allocator.free = [], 0
        allocator.free_blocks(free)
        return allocator

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks: from the smallest extent that is large enough, or from several
        extents, the largest first. Raises ResourceExhaustedError if fewer blocks are free."""
        _check_free(count, self.free, self.total)
        fitting = [e for e in self._extents if e[1] - e[0] >= count]
        if fitting:
            order = [min(fitting, key=lambda e: (e[1] - e[0], e[0]))]
        else:
            order = sorted(self._extents, key=lambda e: (e[0] - e[1], e[0]))
        taken: list[int] = []
        for start, end in order:
            stop = min(end, start + count - len(taken))
            taken.extend(range(start, stop))
            self._replace((start, end), (stop, end))
            if len(taken) == count:
                break
        return taken

    def allocate_contiguous(self, count: int) -> range | None:
        """Allocate `count` contiguous blocks from the largest extent of free blocks. Return None if
        no extent is large enough.

        The blocks are taken from the middle of the extent, so that this sequence and the one before
        it can grow in place. They are taken from the start of an extent that begins with block 0.
        """
        if not self._extents:
            return None
        start, end = max(self._extents, key=lambda e: (e[1] - e[0], -e[0]))
        left = end - start - count
        if left < 0:
            return None
        # The sequence before the extent may grow, too: half of the free blocks are left to it.
        first = start + (left // 2 if start else 0)
        self._replace((start, end), (start, first), (first + count, end))
        return range(first, first + count)

    def allocate_next(self, block: int, count: int) -> bool:
        """Allocate blocks `block` .. `block + count - 1`. If one of them is not free, return False
        without a change."""
        place = bisect_left(self._extents, (block, block))
        if place == len(self._extents):
            return False
        start, end = self._extents[place]
        if start != block or end - start < count:
            return False
        self._replace((start, end), (start + count, end))
        return True

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Free blocks. None of them may be free already."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._extents, *((b, b + 1) for b in blocks)]):
            assert not merged or start >= merged[-1][1], f"block {start} is free already"
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._extents = merged
        self.free += len(blocks)

    def _replace(self, extent: tuple[int, int], *left: tuple[int, int]) -> None:
        """Replace a free extent by its parts `left` that remain free, in ascending order."""
        kept = [(start, end) for start, end in left if start < end]
        place = bisect_left(self._extents, extent)
        self._extents[place : place + 1] = kept
        self.free -= extent[1] - extent[0] - sum(end - start for start, end in kept)


class FreeBlockStack:
    """Allocates single KV blocks for sequences with block tables, whose blocks may lie anywhere in
    the pool. The time of an allocation does not depend on fragmentation."""

    def __init__(self, total: int, free: Sequence[int]) -> None:
        """Manage `total` blocks of which the blocks in `free` are free."""
        self.total = total
        self._blocks = list(reversed(free))
        self._is_free = bytearray(total)
        for block in free:
            self._is_free[block] = 1

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._blocks)

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks. Raises ResourceExhaustedError if fewer blocks are free."""
        _check_free(count, self.free, self.total)
        taken = [self._blocks.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Free blocks. None of them may be free already."""
        for block in reversed(blocks):
            assert not self._is_free[block], f"block {block} is free already"
            self._is_free[block] = 1
            self._blocks.append(block)


def _check_free(count: int, free: int, total: int) -> None:
    if count > free:
        raise ResourceExhaustedError(
            f"{count} KV blocks are needed, {free} of {total} are free",
            reason="KV_BLOCKS_EXHAUSTED",
        )
