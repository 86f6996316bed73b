"""Reference counts of the blocks of a KV pool, with LRU eviction of cached blocks. They do no I/O.

Several sequences may hold a reference to the same block. A *cached* block keeps its content after
its last reference is released, until the block is needed for other content. Such an unreferenced
cached block counts as free. The block released longest ago is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from outrider.engine.block_allocator import BlockAllocator, FreeBlockStack

LOW_FREE_BLOCKS_FACTOR: Final = 2
"""Divisor that limits cached blocks without a reference. If sequences do not use block tables, at
most total / LOW_FREE_BLOCKS_FACTOR of them are kept."""


class BlockRefCounts:
    """Counts the references to each block of a KV pool. An allocator manages the blocks that are
    neither referenced nor cached."""

    def __init__(self, free: BlockAllocator | FreeBlockStack) -> None:
        self._free = free
        self._holders = [0] * free.total
        self._kept = bytearray(free.total)
        # A plain dict searches for its first key past all entries removed before it.
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks without a reference, the block released longest ago first."""
        self.evicted: Callable[[int], None] = lambda block: None
        """Function that is called with the number of each cached block that is evicted."""

    @property
    def uses_block_tables(self) -> bool:
        """Whether sequences use block tables, so that they can share the blocks of a prefix."""
        return isinstance(self._free, FreeBlockStack)

    @property
    def total(self) -> int:
        """Number of blocks."""
        return self._free.total

    @property
    def free(self) -> int:
        """Number of blocks without a reference, cached blocks included."""
        return self._free.free + len(self._idle)

    def use_block_tables(self, by_tables: bool) -> None:
        """Set whether sequences use block tables. A change evicts all cached blocks without a
        reference."""
        if by_tables is self.uses_block_tables:
            return
        self._evict(len(self._idle))
        free = sorted(self._free.allocate_blocks(self._free.free))
        of = FreeBlockStack if by_tables else BlockAllocator.from_free
        self._free = of(self.total, free)

    # ---- holding -------------------------------------------------------------------------------

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each; evict cached blocks if needed.

        Raises ResourceExhaustedError if fewer blocks are without a reference.
        """
        if count <= self.free:
            self._evict(count - self._free.free)
        taken = self._free.allocate_blocks(count)
        self._begin(taken)
        return taken

    def allocate_contiguous(self, count: int) -> range | None:
        """Allocate `count` contiguous blocks with one reference each; evict cached blocks if
        needed. Return None if there is no such run of blocks.

        See `BlockAllocator.allocate_contiguous` for the choice of the blocks.
        """
        assert isinstance(self._free, BlockAllocator)
        extent = self._free.allocate_contiguous(count)
        if extent is None and (room := self._run_of(count)) is not None:
            self._release_unused([block for block in room if block in self._idle])
            extent = self._free.allocate_contiguous(count)
        if extent is not None:
            self._begin(extent)
        return extent

    def allocate_next(self, block: int, count: int) -> bool:
        """Allocate blocks `block` .. `block + count - 1` with one reference each. If one of them
        has a reference or lies beyond the pool, return False without a change."""
        assert isinstance(self._free, BlockAllocator)
        wanted = range(block, block + count)
        if wanted.stop > self.total or any(self._holders[wanted.start : wanted.stop]):
            return False
        self._release_unused([each for each in wanted if each in self._idle])
        taken = self._free.allocate_next(block, count)
        assert taken, (block, count)
        self._begin(wanted)
        return True

    def add_refs(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks must be cached or have a reference already."""
        for block in blocks:
            assert self._kept[block] or self._holders[block], f"block {block} is free"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def release_refs(self, blocks: Sequence[int]) -> None:
        """Release one reference to each block. Each block must have a reference."""
        free: list[int] = []
        # The end of a prefix is useless without its beginning, so it is evicted first.
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._kept[block]:
                self._idle[block] = None
            else:
                free.append(block)
        if free:
            self._free.free_blocks(free[::-1])
        if not self.uses_block_tables:
            self._evict(len(self._idle) - self.total // LOW_FREE_BLOCKS_FACTOR)

    def shared_blocks(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks that have more than one reference."""
        return [block for block in blocks if self._holders[block] > 1]

    # ---- keeping -------------------------------------------------------------------------------

    def retain_block(self, block: int) -> None:
        """Mark a block as cached. The block must have a reference."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._kept[block] = 1

    def release_block(self, block: int) -> None:
        """Remove the cached mark of a block without calling `evicted`. If the block has no
        reference, it becomes free."""
        self._kept[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._free.free_blocks([block])

    def _begin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holders[block] = 1

    def _evict(self, count: int) -> None:
        """Evict `count` cached blocks, the block released longest ago first; none if count <= 0."""
        if count > 0:
            self._release_unused(list(islice(self._idle, count)))

    def _release_unused(self, blocks: Sequence[int]) -> None:
        """Evict cached blocks that have no reference."""
        if not blocks:
            return
        for block in blocks:
            self._kept[block] = 0
            del self._idle[block]
        # In one call, because the extent allocator sorts all extents on each call.
        self._free.free_blocks(blocks)
        for block in blocks:
            self.evicted(block)

    def _run_of(self, count: int) -> range | None:
        """Return the run of at least `count` contiguous blocks without a reference that contains
        the fewest cached blocks, or None if no run is long enough."""
        best: tuple[int, range] | None = None
        start = idle = 0
        for block, holders in enumerate([*self._holders, 1]):
            if not holders:
                idle += self._kept[block]
                continue
            if block - start >= count and (best is None or idle < best[0]):
                best = idle, range(start, block)
            start, idle = block + 1, 0
        return None if best is None else best[1]
