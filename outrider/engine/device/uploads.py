"""Uploads that are not tied to rounds, of which any number can be under way."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.driver import Mark, calls_of

_LEAST_WORDS: Final = 256
"""Words of the smallest memory that is taken."""


class _Staging(NamedTuple):
    """Pinned memory, and the end of the last copy from it."""

    tensor: Tensor
    array: NDArray[np.int32]
    free: Mark


class _Thread(threading.local):
    """A thread's own staging memory, by device and size, the one whose use is longest ago first."""

    def __init__(self) -> None:
        self.held: dict[tuple[torch.device, int], deque[_Staging]] = {}


_thread = _Thread()


def upload(out: Tensor, *parts: NDArray[np.int32]) -> None:
    """Copy `parts`, one behind the other, into `out` int32 [n], n being all their words, in the
    order of the stream; they are free at once.

    On a CUDA device each call takes pinned memory of its own, so nothing waits and nothing is
    overwritten: memory is used again only when the copy from it is done. It is written by numpy:
    torch would wake its pool of threads for more than 32,768 words, which took up to 5 ms of a
    round.
    """
    count = out.shape[0]
    if not count:
        return
    if not out.is_cuda:
        _fill(out.numpy(), parts)
        return
    staging = _take(out.device, count)
    _fill(staging.array[:count], parts)
    calls_of(out.device).copy(out, staging.tensor[:count])
    staging.free.record()


def _fill(words: NDArray[np.int32], parts: tuple[NDArray[np.int32], ...]) -> None:
    end = 0
    for part in parts:
        start, end = end, end + part.size
        words[start:end] = part.reshape(-1)
    assert end == len(words)


def _take(device: torch.device, count: int) -> _Staging:
    """Memory for so many words that nothing is copied from."""
    size = max(_LEAST_WORDS, 1 << (count - 1).bit_length())
    held = _thread.held.setdefault((device, size), deque())
    staging = held.popleft() if held and held[0].free.over else _staging(device, size)
    held.append(staging)
    return staging


def _staging(device: torch.device, size: int) -> _Staging:
    # A tensor made in inference mode could be written in that mode only.
    with torch.inference_mode(False):
        tensor = torch.empty(size, dtype=torch.int32, pin_memory=True)
    return _Staging(tensor, tensor.numpy(), calls_of(device).mark())
