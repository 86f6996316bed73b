"""Swap space: KV of suspended sequences in host memory.

A pool's storage is [2, L, G, S, d] (see `outrider.engine.kv_cache`). Several storages, for example
those of a target and its draft head, may use the same block numbers and are then copied together.
Host memory is divided into blocks; one host block holds one block of every storage. A run is a
series of neighbouring host blocks that are copied in one operation.

On a CUDA device a run is first gathered into device staging memory, on the stream on which rounds
run. The pool's blocks can then be freed immediately. The run is copied to pinned memory on a
separate stream, in parallel with the rounds. Swapping in reverses these steps. The host never
waits.
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
"""Bytes of host memory in one allocation (slab)."""
STAGING_BYTES = 256 << 20
"""Bytes of device staging memory. Half of it is for swapping out, the other half for swapping
in."""
MAX_RUN_BYTES = 32 << 20
"""Maximum bytes of one run. While a run is copied to the host, the next one is gathered."""
_GAIN = 0.2
"""Weight of a new measurement in the moving average of copy rates."""
_PROBE_BYTES = 8 << 20
"""Maximum bytes that are copied when a swap space is created, to measure the first copy rates."""


@dataclass(slots=True, eq=False)
class SavedKV:
    """The KV of one sequence in host memory."""

    length: int
    """Number of slots that were saved."""
    positions: Tensor | None
    """Positions of the slots, or None if the host stores none. See `KVSequence.save_positions`."""
    blocks: list[int]
    """Numbers of the host blocks, in order. Empty after the copy was restored or dropped."""
    runs: list[Tensor]
    """Host memory of the blocks, one uint8 tensor per run."""


class SwapSpace:
    """Holds host copies of the KV of suspended sequences, within a byte budget. Only one thread may
    use it."""

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
        """Create a swap space of `budget_bytes`, rounded down to whole blocks.

        `storages` are the KV tensors that share block numbers, on one device. `staged` says whether
        copies pass through device staging memory; with None they do on a CUDA device only. On a
        CUDA device all host memory is allocated here, because allocating pinned memory delays
        rounds.
        """
        layout = BlockLayout(storages, block_tokens)
        self._block_tokens = block_tokens
        self.block_bytes = layout.block_bytes
        """Total bytes of one block over all storages."""
        self._total = budget_bytes // layout.block_bytes
        self._run_blocks = max(1, run_bytes // layout.block_bytes)
        self._slab_blocks = max(self._run_blocks, slab_bytes // layout.block_bytes)
        self._host = BlockAllocator(max(1, self._total))
        self._slabs: list[Tensor] = []
        self._pinned = layout.device.type == "cuda"
        self._path: SwapPath = DirectSwapPath(layout)
        if self._pinned if staged is None else staged:
            size = self._run_blocks * layout.block_bytes
            self._path = StagedSwapPath(layout, run_bytes=size, staging_bytes=staging_bytes)
        self._rates = [0.0, 0.0]
        """Measured seconds per byte of copies to the host and of copies back."""
        if self._total:
            self._probe(min(layout.num_blocks, self._total, self._run_blocks))

    @property
    def budget_bytes(self) -> int:
        """Maximum bytes of host memory for all copies, a multiple of `block_bytes`."""
        return self._total * self.block_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that saved copies occupy now."""
        return (self._host.total - self._host.free) * self.block_bytes

    def has_room_for(self, num_tokens: int) -> bool:
        """Return whether the KV of `num_tokens` slots fits into the free host memory now."""
        return self._total > 0 and self._blocks_for(num_tokens) <= self._host.free

    def round_trip_s(self, num_tokens: int) -> float:
        """Return the estimated seconds to copy the KV of `num_tokens` slots to the host and back,
        as measured on recent copies. Most of this time overlaps with rounds."""
        return sum(self.copy_times_s(num_tokens))

    def copy_times_s(self, num_tokens: int) -> tuple[float, float]:
        """Return two estimates for the KV of `num_tokens` slots, in seconds: the time of the copy
        to the host, and the time of the copy back."""
        self._learn()
        size = self._blocks_for(num_tokens) * self.block_bytes
        return self._rates[0] * size, self._rates[1] * size

    @torch.inference_mode()
    def swap_out_sequence(self, kv: KVSequence) -> SavedKV | None:
        """Copy the committed slots of a sequence to host memory. Return the saved copy, or None if
        it does not fit into the budget. The blocks of `kv` may be freed as soon as this returns."""
        if not self.has_room_for(kv.len):
            return None
        count = self._blocks_for(kv.len)
        blocks = self._host.allocate_blocks(count)
        runs = self._runs(blocks)
        self._path.save_blocks(kv.blocks[:count], runs)
        return SavedKV(kv.len, kv.save_positions(), blocks, runs)

    @torch.inference_mode()
    def prefetch(self, saved: SavedKV) -> bool:
        """Start to copy saved KV back to the device, in parallel with the rounds.

        Call it again until it returns True: then `swap_in_sequence` does not delay a round. Only
        one saved copy is prefetched at a time.
        """
        return self._path.prefetch_runs(saved.runs)

    @torch.inference_mode()
    def swap_in_sequence(self, saved: SavedKV, kv: KVSequence) -> None:
        """Fill an empty sequence from a saved copy and drop the copy. Raises ValueError if the
        sequence is not empty or has too few slots."""
        kv.restore(saved.length, saved.positions)
        self._path.load_blocks(saved.runs, kv.blocks[: len(saved.blocks)])
        self.drop_copy(saved)

    def drop_copy(self, saved: SavedKV) -> None:
        """Free the host memory of a saved copy. Idempotent."""
        blocks, saved.blocks, saved.runs = saved.blocks, [], []
        if blocks:
            self._host.free_blocks(blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _runs(self, blocks: Sequence[int]) -> list[Tensor]:
        """Return the memory of host blocks, with neighbouring blocks of one slab joined into
        runs."""
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
        # A tensor made in inference mode can be written in that mode only.
        with torch.inference_mode(False):
            slab = torch.empty(
                blocks * self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        self._slabs.append(slab)

    @torch.inference_mode()
    def _probe(self, count: int) -> None:
        """Allocate all pinned memory, and measure copy rates by copying blocks of the pool out and
        back, which leaves them unchanged."""
        while self._pinned and len(self._slabs) * self._slab_blocks < self._total:
            self._add_slab()
        count = max(1, min(count, _PROBE_BYTES // self.block_bytes))
        runs = self._runs(range(count))
        for _ in range(2):
            # The first copies are slower than all later ones, so only the second are measured.
            self._path.take_copy_times()
            self._path.save_blocks(range(count), runs)
            self._path.load_blocks(runs, range(count))
            if self._pinned:
                torch.cuda.synchronize()
        self._learn()

    def _learn(self) -> None:
        for took in self._path.take_copy_times():
            if not took.bytes:
                continue
            rate, known = took.seconds / took.bytes, self._rates[took.is_restore]
            self._rates[took.is_restore] = rate if not known else known + _GAIN * (rate - known)
