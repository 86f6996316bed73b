# mypy: disable-error-code="no-untyped-call"
"""Pinned host memory on the way to the device and back; plain copies on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING = 4
"""Buffers of a ring: more than the rounds that can be in flight, so that none is overwritten."""


class Uploader:
    """Non-blocking copies of int32 arrays to the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: most elements of one upload."""
        pinned = device.type == "cuda"
        self._ring = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._next = 0

    def upload(self, array: NDArray[np.int32], out: Tensor) -> None:
        """Copy `array` [n] into `out` int32 [n], in the order of the stream."""
        staged = self._ring[self._next][: array.size]
        self._next = (self._next + 1) % RING
        staged.numpy()[:] = array
        out.copy_(staged, non_blocking=True)


class Readback:
    """A tensor on its way to the host."""

    __slots__ = ("_event", "_host")

    def __init__(self, host: Tensor, event: torch.cuda.Event | None) -> None:
        self._host, self._event = host, event

    def wait(self) -> Tensor:
        """The host copy; it is overwritten RING uses of its ring later."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Downloader:
    """Non-blocking copies to pinned memory, each with an event to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._rings: dict[Any, tuple[list[Tensor], list[int]]] = {}

    def start(self, tensor: Tensor) -> Readback:
        """Begin to copy `tensor`, in the order of the stream."""
        if not self._cuda:
            return Readback(tensor.clone(), None)
        host = self._take(tensor)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Readback(host, event)

    def _take(self, tensor: Tensor) -> Tensor:
        key = (tuple(tensor.shape), tensor.dtype)
        if key not in self._rings:
            ring = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for _ in range(RING)
            ]
            self._rings[key] = (ring, [0])
        ring, place = self._rings[key]
        place[0] = (place[0] + 1) % RING
        return ring[place[0]]
