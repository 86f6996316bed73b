# mypy: disable-error-code="no-untyped-call"
"""Copy paths of KV blocks between a pool and host memory: direct, or staged on a CUDA device.

n blocks of a run, g = 2 * L * G heads of a storage, B bytes of a block of all storages. A run is
host memory uint8 [n * B]: of each storage in turn [g, n, block_tokens * d].
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
    """Duration of a finished copy."""

    bytes: int
    seconds: float
    is_restore: bool
    """Whether it was one into the pool."""


class BlockLayout:
    """Layout of the blocks of storages [2, L, G, S, d] that share block numbers."""

    def __init__(self, storages: Sequence[Tensor], block_tokens: int) -> None:
        self.device = storages[0].device
        self._views = [
            s.view(s.shape[0] * s.shape[1] * s.shape[2], -1, block_tokens * s.shape[4])
            for s in storages
        ]
        self.num_blocks = self._views[0].shape[1]
        """Blocks of the pool."""
        self._bytes = [view.nbytes // self.num_blocks for view in self._views]
        self.block_bytes = sum(self._bytes)
        """B."""

    def index(self, blocks: Sequence[int]) -> Tensor:
        """int64 [n] on the device, in the order of the stream."""
        numbers = torch.empty(len(blocks), dtype=torch.int32, device=self.device)
        upload_int32s(numbers, np.array(blocks, dtype=np.int32))
        return numbers.long()

    def gather(self, blocks: Tensor, run: Tensor) -> None:
        """Copy blocks int64 [n] of the pool into `run`, which is where the pool is."""
        for view, part in zip(self._views, self._parts(run), strict=True):
            torch.index_select(view, 1, blocks, out=part)

    def scatter(self, run: Tensor, blocks: Tensor) -> None:
        """The other way round."""
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
    """Copies runs in the order of the calls; reads and writes of the pool are ordered with the work
    launched there before and after them."""

    def save_blocks(self, blocks: Sequence[int], runs: Sequence[Tensor]) -> None:
        """Blocks of the pool to runs; the blocks may be given away at once."""
        ...

    def prefetch_runs(self, runs: Sequence[Tensor]) -> bool:
        """Bring runs near, as many as find room, for a `load` of the same runs; whether that need
        not wait. May be called again. Forgets what was fetched before, if that is another."""
        ...

    def load_blocks(self, runs: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Runs to blocks of the pool; the host memory may be saved to at once."""
        ...

    def take_copy_times(self) -> list[CopyTime]:
        """What copies took that have ended and were not told yet."""
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
        """Nothing to do."""
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
    """Staging memory of a run."""

    def __init__(self, size: int, device: torch.device) -> None:
        # A tensor made in inference mode could be written in that mode only.
        with torch.inference_mode(False):
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        self.filled: torch.cuda.Event | None = None
        """What is in it was written."""
        self.emptied: torch.cuda.Event | None = None
        """What was in it was read."""


class _Timed(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event
    bytes: int
    back: bool


class StagedSwapPath:
    """Copies runs in parallel with the rounds of a CUDA device, through staging memory on it; on a
    CPU the same steps run one after another."""

    def __init__(self, layout: BlockLayout, *, run_bytes: int, staging_bytes: int) -> None:
        """`run_bytes`: of the longest run; `staging_bytes`: for both ways together."""
        self._layout, device = layout, layout.device
        count = max(2, staging_bytes // 2 // run_bytes)
        self._out = [_SwapBuffer(run_bytes, device) for _ in range(count)]
        self._back = [_SwapBuffer(run_bytes, device) for _ in range(count)]
        self._next_out = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fetched: list[Tensor] = []
        """Runs that are in the first buffers of the way back."""
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
        """Copy runs into buffers, beside the rounds."""
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
        """Launch on the stream beside the rounds."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def _mark(self) -> torch.cuda.Event | None:
        """The end of what the current stream was given so far."""
        if self._side is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _wait(event: torch.cuda.Event | None) -> None:
    """Let what the current stream is given from here on wait for an event."""
    if event is not None:
        event.wait()


def _same(runs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(runs) == len(others) and all(a is b for a, b in zip(runs, others, strict=True))


def _by_run(
    layout: BlockLayout, runs: Sequence[Tensor], blocks: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each run with the numbers int64 [n] of its blocks of the pool."""
    numbers = layout.index(blocks)
    first = 0
    for run in runs:
        end = first + run.shape[0] // layout.block_bytes
        yield run, numbers[first:end]
        first = end
