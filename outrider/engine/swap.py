"""Swap space: KV of suspended sequences in host memory.

A pool's storage is [2, L, G, S, d] (see `outrider.engine.kv_cache`); several storages may share the
numbers of blocks (a target's and its draft head's) and travel together. Host memory is divided into
blocks as large as one block of all storages together; neighbouring blocks are copied at once, as a
run.

On a CUDA device a run is gathered into device staging memory on the stream of the rounds, so that
the blocks can be freed at once, and is then copied to pinned memory on a separate stream, in
parallel with the rounds. Swapping in reverses these steps. The host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.block_allocator import BlockAllocator
from outrider.engine.kv_cache import KVSequence
from outrider.engine.swap_paths import BlockLayout, DirectSwapPath, StagedSwapPath, SwapPath

SLAB_BYTES = 256 << 20
"""Host memory that is taken at a time."""
STAGING_BYTES = 256 << 20
"""Memory on a device that KV passes on its way, both ways together."""
MAX_RUN_BYTES = 32 << 20
"""Most bytes that are copied at once: those of the next run are gathered meanwhile."""
_GAIN = 0.2
"""Weight of a new measurement."""
_PROBE_BYTES = 8 << 20
"""Copied at the start, so that there is something to go by."""


@dataclass(slots=True, eq=False)
class SavedKV:
    """The KV of one sequence in host memory."""

    length: int
    """Slots."""
    positions: Tensor | None
    """See `KVSequence.save_positions`."""
    blocks: list[int]
    """Of the host, in order; none once it was restored or dropped."""
    runs: list[Tensor]
    """The same as memory."""


class SwapSpace:
    """Holds host copies of suspended sequences within a byte budget. Single-threaded."""

    def __init__(
        self,
        budget_bytes: int,
        storages: Sequence[Tensor],
        *,
        block_tokens: int,
        slab_bytes: int = SLAB_BYTES,
        run_bytes: int = MAX_RUN_BYTES,
        staging_bytes: int = STAGING_BYTES,
        staged: bool | None = None,
    ) -> None:
        """`storages`: the tensors that the same blocks number, on one device. `staged`: whether
        copies pass through staging memory; None: on a CUDA device only.

        On a CUDA device all memory is taken here: taking pinned memory makes rounds wait.
        """
        layout = BlockLayout(storages, block_tokens)
        self._block_tokens = block_tokens
        self.block_bytes = layout.block_bytes
        """Bytes of one block of all storages."""
        self._total = budget_bytes // layout.block_bytes
        self._run_blocks = max(1, run_bytes // layout.block_bytes)
        self._slab_blocks = max(self._run_blocks, slab_bytes // layout.block_bytes)
        self._host = BlockAllocator(max(1, self._total))
        self._slabs: list[Tensor] = []
        self._pinned = layout.device.type == "cuda"
        self._shm_channel: SwapPath = DirectSwapPath(layout)
        if self._pinned if staged is None else staged:
            size = self._run_blocks * layout.block_bytes
            self._shm_channel = StagedSwapPath(layout, run_bytes=size, staging_bytes=staging_bytes)
        self._rates = [0.0, 0.0]
        """Seconds a byte, out and back."""
        if self._total:
            self._probe(min(layout.num_blocks, self._total, self._run_blocks))

    @property
    def budget_bytes(self) -> int:
        """Host memory that copies may take in all: whole blocks."""
        return self._total * self.block_bytes

    @property
    def used_bytes(self) -> int:
        """Host memory that copies take now."""
        return (self._host.total - self._host.free) * self.block_bytes

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether there is room for the KV of so many slots now."""
        return self._total > 0 and self._blocks_for(num_tokens) <= self._host.free

    def round_trip_s(self, num_tokens: int) -> float:
        """What it takes to bring the KV of so many slots out and back again, by what copies took
        lately; most of that is beside the rounds."""
        return sum(self.copy_times_s(num_tokens))

    def copy_times_s(self, num_tokens: int) -> tuple[float, float]:
        """The same for each way: out, back."""
        self._learn()
        size = self._blocks_for(num_tokens) * self.block_bytes
        return self._rates[0] * size, self._rates[1] * size

    @torch.inference_mode()
    def swap_out_sequence(self, kv: KVSequence) -> SavedKV | None:
        """Copy what is committed; None if there is no room in the budget. `kv` may be cleared at
        once."""
        if not self.has_room_for(kv.len):
            return None
        count = self._blocks_for(kv.len)
        blocks = self._host.allocate_blocks(count)
        runs = self._runs(blocks)
        self._shm_channel.save_blocks(kv.blocks[:count], runs)
        return SavedKV(kv.len, kv.save_positions(), blocks, runs)

    @torch.inference_mode()
    def prefetch(self, saved: SavedKV) -> bool:
        """Begin to bring a copy back, beside the rounds: whether `restore` would make none wait.
        To be called again until it is so; one copy at a time is brought."""
        return self._shm_channel.prefetch_runs(saved.runs)

    @torch.inference_mode()
    def swap_in_sequence(self, saved: SavedKV, kv: KVSequence) -> None:
        """Fill an empty sequence that holds blocks enough; the copy is dropped. Raises ValueError
        if the sequence does not fit."""
        kv.restore(saved.length, saved.positions)
        self._shm_channel.load_blocks(saved.runs, kv.blocks[: len(saved.blocks)])
        self.drop_copy(saved)

    def drop_copy(self, saved: SavedKV) -> None:
        """Forget a copy. Idempotent."""
        blocks, saved.blocks, saved.runs = saved.blocks, [], []
        if blocks:
            self._host.free_blocks(blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _runs(self, blocks: Sequence[int]) -> list[Tensor]:
        """The memory of blocks of the host: neighbours of one slab together."""
        runs: list[Tensor] = []
        first, count = 0, 0
        for block in blocks:
            follows = block == first + count and block % self._slab_blocks
            if count and not (follows and count < self._run_blocks):
                runs.append(self._memory(first, count))
                count = 0
            if not count:
                first = block
            count += 1
        if count:
            runs.append(self._memory(first, count))
        return runs

    def _memory(self, first: int, count: int) -> Tensor:
        slab, place = divmod(first, self._slab_blocks)
        while len(self._slabs) <= slab:
            self._add_slab()
        start = place * self.block_bytes
        return self._slabs[slab][start : start + count * self.block_bytes]

    def _add_slab(self) -> None:
        blocks = min(self._slab_blocks, self._total - len(self._slabs) * self._slab_blocks)
        # A tensor made in inference mode could be written in that mode only.
        with torch.inference_mode(False):
            slab = torch.empty(
                blocks * self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        self._slabs.append(slab)

    @torch.inference_mode()
    def _probe(self, count: int) -> None:
        """Take the memory that is not to be taken later, and see how fast copies are: blocks of the
        pool go out and come back as they were."""
        while self._pinned and len(self._slabs) * self._slab_blocks < self._total:
            self._add_slab()
        count = max(1, min(count, _PROBE_BYTES // self.block_bytes))
        runs = self._runs(range(count))
        for _ in range(2):
            # The first time takes longer than any later one.
            self._shm_channel.take_copy_times()
            self._shm_channel.save_blocks(range(count), runs)
            self._shm_channel.load_blocks(runs, range(count))
            if self._pinned:
                torch.cuda.synchronize()
        self._learn()

    def _learn(self) -> None:
        for took in self._shm_channel.take_copy_times():
            if not took.bytes:
                continue
            rate, known = took.seconds / took.bytes, self._rates[took.is_restore]
            self._rates[took.is_restore] = rate if not known else known + _GAIN * (rate - known)
