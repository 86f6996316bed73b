# mypy: disable-error-code="no-untyped-call"
"""Copy paths of KV blocks between a pool and host memory: direct, or staged on a CUDA device.

A run is host memory of n blocks, uint8 [n * B], where B is the bytes of one block over all
storages. It contains, for each storage in turn, [g, n, block_tokens * d] elements, where g = 2 * L
* G counts the keys and values of all layers and heads. See `outrider.engine.kv_cache` for the shape
of a storage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device.transfer.uploads import upload_int32s


class CopyTime(NamedTuple):
    """Size and duration of a finished copy between pool and host."""

    bytes: int
    seconds: float
    is_restore: bool
    """Whether the copy went from the host into the pool."""


class BlockLayout:
    """Layout of the blocks of one or more storages [2, L, G, S, d] that use the same block
    numbers."""

    def __init__(self, storages: Sequence[Tensor], block_tokens: int) -> None:
        self.device = storages[0].device
        self._views = [
            s.view(s.shape[0] * s.shape[1] * s.shape[2], -1, block_tokens * s.shape[4])
            for s in storages
        ]
        self.num_blocks = self._views[0].shape[1]
        """Number of blocks of the pool."""
        self._bytes = [view.nbytes // self.num_blocks for view in self._views]
        self.block_bytes = sum(self._bytes)
        """Total bytes of one block over all storages."""

    def index(self, blocks: Sequence[int]) -> Tensor:
        """Return block numbers as an int64 [n] tensor on the device. The upload is part of the
        current stream, so that later work on this stream sees the numbers."""
        numbers = torch.empty(len(blocks), dtype=torch.int32, device=self.device)
        upload_int32s(numbers, np.array(blocks, dtype=np.int32))
        return numbers.long()

    def gather(self, blocks: Tensor, run: Tensor) -> None:
        """Copy the blocks of the pool with numbers `blocks`, int64 [n], into `run`, which must be
        on the pool's device."""
        for view, part in zip(self._views, self._parts(run), strict=True):
            torch.index_select(view, 1, blocks, out=part)

    def scatter(self, run: Tensor, blocks: Tensor) -> None:
        """Copy `run`, which must be on the pool's device, into the blocks of the pool with numbers
        `blocks`, int64 [n]."""
        for view, part in zip(self._views, self._parts(run), strict=True):
            view.index_copy_(1, blocks, part)

    def _parts(self, run: Tensor) -> list[Tensor]:
        count = run.shape[0] // self.block_bytes
        parts = run.split([count * size for size in self._bytes])
        return [
            part.view(view.dtype).view(view.shape[0], count, view.shape[2])
            for view, part in zip(self._views, parts, strict=True)
        ]


class SwapPath(Protocol):
    """Interface for copying runs of blocks between a pool and host memory.

    Copies are made in the order of the calls. Reads and writes of the pool are ordered with the
    work that was launched on the current stream before and after them.
    """

    def save_blocks(self, blocks: Sequence[int], runs: Sequence[Tensor]) -> None:
        """Copy blocks of the pool to runs of host memory. The blocks may be freed as soon as this
        returns."""
        ...

    def prefetch_runs(self, runs: Sequence[Tensor]) -> bool:
        """Start to copy the first of the runs, as many as fit into staging memory, for a later
        `load_blocks` of the same runs. Return whether these copies have ended.

        The call may be repeated until it returns True. Calling it with other runs drops the runs
        that were prefetched before.
        """
        ...

    def load_blocks(self, runs: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Copy runs of host memory to blocks of the pool. The host memory may be reused for
        `save_blocks` as soon as this returns."""
        ...

    def take_copy_times(self) -> list[CopyTime]:
        """Return the durations of the copies that ended since the last call."""
        ...


class DirectSwapPath:
    """Copies runs synchronously on the host."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._took: list[CopyTime] = []

    def save_blocks(self, blocks: Sequence[int], runs: Sequence[Tensor]) -> None:
        """See `SwapPath`."""
        began = time.perf_counter()
        for run, numbers in _by_run(self._layout, runs, blocks):
            self._layout.gather(numbers, run)
        self._note(runs, began, back=False)

    def prefetch_runs(self, runs: Sequence[Tensor]) -> bool:
        """Return True: direct copies have nothing to prefetch."""
        return True

    def load_blocks(self, runs: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """See `SwapPath`."""
        began = time.perf_counter()
        for run, numbers in _by_run(self._layout, runs, blocks):
            self._layout.scatter(run, numbers)
        self._note(runs, began, back=True)

    def take_copy_times(self) -> list[CopyTime]:
        """See `SwapPath`."""
        took, self._took = self._took, []
        return took

    def _note(self, runs: Sequence[Tensor], began: float, *, back: bool) -> None:
        size = sum(run.shape[0] for run in runs)
        self._took.append(CopyTime(size, time.perf_counter() - began, back))


class _SwapBuffer:
    """Device staging memory for one run."""

    def __init__(self, size: int, device: torch.device) -> None:
        # A tensor made in inference mode could be written in that mode only.
        with torch.inference_mode(False):
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        self.filled: torch.cuda.Event | None = None
        """Event after the last write of the buffer."""
        self.emptied: torch.cuda.Event | None = None
        """Event after the last read of the buffer."""


class _Timed(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event
    bytes: int
    back: bool


class StagedSwapPath:
    """Copies runs in parallel with the rounds of a CUDA device, through staging memory on the
    device. On a CPU the same steps run one after another."""

    def __init__(self, layout: BlockLayout, *, run_bytes: int, staging_bytes: int) -> None:
        """Allocate the staging memory on the device of `layout`.

        `run_bytes` is the size of the longest run. `staging_bytes` is the size of all staging
        memory, half of it for each direction.
        """
        self._layout, device = layout, layout.device
        count = max(2, staging_bytes // 2 // run_bytes)
        self._out = [_SwapBuffer(run_bytes, device) for _ in range(count)]
        self._back = [_SwapBuffer(run_bytes, device) for _ in range(count)]
        self._next_out = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fetched: list[Tensor] = []
        """Runs that were prefetched into the first buffers of `_back`."""
        self._timed: list[_Timed] = []

    def save_blocks(self, blocks: Sequence[int], runs: Sequence[Tensor]) -> None:
        """See `SwapPath`."""
        start: torch.cuda.Event | None = None
        for run, numbers in _by_run(self._layout, runs, blocks):
            buffer = self._out[self._next_out]
            self._next_out = (self._next_out + 1) % len(self._out)
            staged = buffer.data[: run.shape[0]]
            _wait(buffer.emptied)
            self._layout.gather(numbers, staged)
            buffer.filled = self._mark()
            with self._beside():
                _wait(buffer.filled)
                start = start or self._mark()
                run.copy_(staged, non_blocking=True)
                buffer.emptied = self._mark()
        self._time(start, runs, back=False)

    def prefetch_runs(self, runs: Sequence[Tensor]) -> bool:
        """See `SwapPath`."""
        near = list(runs[: len(self._back)])
        if not _same(near, self._fetched):
            self._stage(near, self._back)
            self._fetched = near
        filled = [buffer.filled for buffer in self._back[: len(near)]]
        return all(event is None or event.query() for event in filled)

    def load_blocks(self, runs: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """See `SwapPath`."""
        count = len(self._back)
        if not _same(runs[:count], self._fetched):
            self._stage(runs[:count], self._back)
        for place, (run, numbers) in enumerate(_by_run(self._layout, runs, blocks)):
            buffer = self._back[place % count]
            if place >= count:
                self._stage([run], [buffer])
            _wait(buffer.filled)
            self._layout.scatter(buffer.data[: run.shape[0]], numbers)
            buffer.emptied = self._mark()
        self._fetched = []

    def take_copy_times(self) -> list[CopyTime]:
        """See `SwapPath`."""
        ended = [timed for timed in self._timed if timed.end.query()]
        self._timed = [timed for timed in self._timed if timed not in ended]
        return [
            CopyTime(timed.bytes, timed.start.elapsed_time(timed.end) / 1e3, timed.back)
            for timed in ended
        ]

    def _stage(self, runs: Sequence[Tensor], buffers: Sequence[_SwapBuffer]) -> None:
        """Copy runs into buffers on the separate stream, in parallel with the rounds."""
        start: torch.cuda.Event | None = None
        with self._beside():
            for run, buffer in zip(runs, buffers, strict=False):
                _wait(buffer.emptied)
                start = start or self._mark()
                buffer.data[: run.shape[0]].copy_(run, non_blocking=True)
                buffer.filled = self._mark()
            self._time(start, runs, back=True)

    def _time(self, start: torch.cuda.Event | None, runs: Sequence[Tensor], *, back: bool) -> None:
        with self._beside():
            end = self._mark()
        if start is not None and end is not None:
            self._timed.append(_Timed(start, end, sum(run.shape[0] for run in runs), back))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run the CUDA launches of the `with` block on the separate stream."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def _mark(self) -> torch.cuda.Event | None:
        """Record an event on the current stream and return it; None on a CPU."""
        if self._side is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _wait(event: torch.cuda.Event | None) -> None:
    """Make later work on the current stream wait for an event."""
    if event is not None:
        event.wait()


def _same(runs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(runs) == len(others) and all(a is b for a, b in zip(runs, others, strict=True))


def _by_run(
    layout: BlockLayout, runs: Sequence[Tensor], blocks: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each run with the numbers of its pool blocks, int64 [n]."""
    numbers = layout.index(blocks)
    first = 0
    for run in runs:
        end = first + run.shape[0] // layout.block_bytes
        yield run, numbers[first:end]
        first = end
