"""Reference counts of the blocks of a KV pool, with LRU eviction of cached blocks. Pure.

Several sequences may hold the same block. A *kept* block keeps its content after its last holder
has released it, until the block is needed: it counts as free, and the block released longest ago is
evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from outrider.engine.block_allocator import BlockAllocator, FreeBlockStack

LOW_FREE_BLOCKS_FACTOR: Final = 2
"""Where sequences are to lie in one piece, at most one of so many blocks is kept for nobody."""


class BlockRefCounts:
    """Counts the holders of each block, on top of an allocator of free blocks."""

    def __init__(self, free: BlockAllocator | FreeBlockStack) -> None:
        self._free = free
        self._holders = [0] * free.total
        self._kept = bytearray(free.total)
        # A plain dict looks for its first key among all that were removed before it.
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that are kept and that nobody holds, longest first."""
        self.evicted: Callable[[int], None] = lambda block: None
        """Called for a kept block that somebody else is about to have."""

    @property
    def uses_block_tables(self) -> bool:
        """Whether any blocks will do, so that a sequence may begin with those of another."""
        return isinstance(self._free, FreeBlockStack)

    @property
    def total(self) -> int:
        """Number of blocks."""
        return self._free.total

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return self._free.free + len(self._idle)

    def use_block_tables(self, by_tables: bool) -> None:
        """From here on any blocks will do, or not any more."""
        if by_tables is self.uses_block_tables:
            return
        self._evict(len(self._idle))
        free = sorted(self._free.allocate_blocks(self._free.free))
        of = FreeBlockStack if by_tables else BlockAllocator.from_free
        self._free = of(self.total, free)

    # ---- holding -------------------------------------------------------------------------------

    def allocate_blocks(self, count: int) -> list[int]:
        """Hold `count` blocks that nobody holds. Raises ResourceExhaustedError when fewer are."""
        if count <= self.free:
            self._evict(count - self._free.free)
        taken = self._free.allocate_blocks(count)
        self._begin(taken)
        return taken

    def allocate_contiguous(self, count: int) -> range | None:
        """The same of neighbouring blocks, see `BlockAllocator.allocate_contiguous`; None if there
        are none."""
        assert isinstance(self._free, BlockAllocator)
        extent = self._free.allocate_contiguous(count)
        if extent is None and (room := self._run_of(count)) is not None:
            self._release_unused([block for block in room if block in self._idle])
            extent = self._free.allocate_contiguous(count)
        if extent is not None:
            self._begin(extent)
        return extent

    def allocate_next(self, block: int, count: int) -> bool:
        """Hold the `count` blocks from `block` on; False, and nothing is changed, if somebody holds
        one of them."""
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
        """Hold blocks that are kept, or that somebody holds already."""
        for block in blocks:
            assert self._kept[block] or self._holders[block], f"block {block} is free"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def release_refs(self, blocks: Sequence[int]) -> None:
        """Hold blocks no longer. A block that nobody holds is a bug of the caller."""
        free: list[int] = []
        # The end of a prefix is of no use without its beginning: it is to go first.
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
        """Those of these blocks that several hold."""
        return [block for block in blocks if self._holders[block] > 1]

    # ---- keeping -------------------------------------------------------------------------------

    def retain_block(self, block: int) -> None:
        """Keep a block that somebody holds."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._kept[block] = 1

    def release_block(self, block: int) -> None:
        """Keep a block no longer; nobody is told."""
        self._kept[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._free.free_blocks([block])

    def _begin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holders[block] = 1

    def _evict(self, count: int) -> None:
        """Let go of so many blocks that nobody holds; of none if that is negative."""
        if count > 0:
            self._release_unused(list(islice(self._idle, count)))

    def _release_unused(self, blocks: Sequence[int]) -> None:
        """Let go of kept blocks that nobody holds."""
        if not blocks:
            return
        for block in blocks:
            self._kept[block] = 0
            del self._idle[block]
        # At once: an allocator of extents sorts them all.
        self._free.free_blocks(blocks)
        for block in blocks:
            self.evicted(block)

    def _run_of(self, count: int) -> range | None:
        """Of the neighbouring blocks that nobody holds, `count` at least, those for which the
        fewest kept ones must go; None if there are none so long."""
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
