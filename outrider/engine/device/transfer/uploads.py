"""Asynchronous uploads to the device, of which any number may be in progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.cuda_driver import StreamEvent, driver_for

_MIN_WORDS: Final = 256
"""Minimum size of staging memory, in int32 words."""


class StagingMemory(NamedTuple):
    """Pinned host memory for uploads, and `free`, the event after the last copy from it."""

    device: torch.device
    tensor: Tensor
    array: NDArray[np.int32]
    free: StreamEvent


def make_staging(device: torch.device, size: int) -> StagingMemory:
    """Return pinned memory of `size` int32 words for copies to this device."""
    # A tensor made in inference mode could be written in that mode only.
    with torch.inference_mode(False):
        tensor = torch.empty(size, dtype=torch.int32, pin_memory=True)
    return StagingMemory(device, tensor, tensor.numpy(), driver_for(device).make_event())


class StagingPool:
    """Pool of pinned memory for all threads. It never frees memory, so it grows to the largest
    amount that was in use at the same time."""

    def __init__(self, make: Callable[[torch.device, int], StagingMemory] = make_staging) -> None:
        """`make`: function that allocates memory for a device and a number of words."""
        self._make = make
        self._held: dict[tuple[torch.device, int], deque[StagingMemory]] = {}
        """Free staging memory by device and size, least recently used first."""

    def take(self, device: torch.device, count: int) -> StagingMemory:
        """Take memory of at least `count` words from which no copy is in progress."""
        size = max(_MIN_WORDS, 1 << (count - 1).bit_length())
        held = self._held.setdefault((device, size), deque())
        try:
            staging = held.popleft()
        except IndexError:
            return self._make(device, size)
        if staging.free.is_complete:
            return staging
        held.appendleft(staging)
        return self._make(device, size)

    def give_back(self, staging: StagingMemory) -> None:
        """Return staging memory to the pool. `take` returns it again only after the last copy from
        it is complete."""
        self._held[staging.device, len(staging.array)].append(staging)


_POOL: Final = StagingPool()


def upload_int32s(out: Tensor, *parts: NDArray[np.int32]) -> None:
    """Copy the concatenated `parts` to `out`, int32 [n], in stream order. `parts` may be changed
    after the call.

    The parts must have n words in total. On a CUDA device each call takes pinned memory from which
    no copy is in progress, so the call does not wait and overwrites nothing. The memory is filled
    by numpy, because torch would wake its thread pool for more than 32,768 words, which took up to
    5 ms of a round.
    """
    assert out.dtype is torch.int32
    count = out.shape[0]
    if not out.is_cuda:
        _fill(out.numpy(), parts)
        return
    if not count:
        _fill(np.empty(0, np.int32), parts)
        return
    staging = _POOL.take(out.device, count)
    _fill(staging.array[:count], parts)
    driver_for(out.device).copy_tensor(out, staging.tensor[:count])
    staging.free.record()
    _POOL.give_back(staging)


def _fill(words: NDArray[np.int32], parts: tuple[NDArray[np.int32], ...]) -> None:
    end = 0
    for part in parts:
        start, end = end, end + part.size
        words[start:end] = part.reshape(-1)
    assert end == len(words)
