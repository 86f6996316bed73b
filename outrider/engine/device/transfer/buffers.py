"""Pinned staging buffers for uploads and downloads. On a CPU they are not pinned.

A round may consist of several launches, called parts. Each part has its own rings of buffers, so
that a ring advances by one buffer per round, however many parts a round has.

Work that is launched and awaited before any other work needs no rings. Its copies to and from fixed
memory (`HostMirror`, `DownloadBuffer`) may be steps of a CUDA graph instead of separate calls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.cuda_driver import DriverInterface, StreamEvent, driver_for
from outrider.engine.device.trial_capture import outside_capture

NUM_STAGING_BUFFERS = 4
"""Number of buffers of a ring. It exceeds the number of rounds in flight, so that no buffer in use
is overwritten."""


_SHARED_BYTES = 1 << 20
"""Downloads of at least this size share buffers with those of other numbers of rows."""


class _StagingBuffer(NamedTuple):
    """Host memory, and a view of it that Python fills or reads."""

    tensor: Tensor
    array: NDArray[np.generic]
    heads: dict[int, Tensor]
    """Slices of `tensor` by length, kept because making a slice takes longer than looking it up."""
    landed: StreamEvent | None
    """Event after the last copy into the buffer; None in rings for uploads."""


class Uploader:
    """Copies int32 words to the device without blocking. At most `ring` copies of each part of a
    round may be in progress."""

    def __init__(self, size: int, device: torch.device, *, ring: int = NUM_STAGING_BUFFERS) -> None:
        """`size`: maximum number of elements of one upload. `ring`: maximum number of uploads of
        one part that are in progress at the same time."""
        self._size, self._pinned, self._num_buffers = size, device.type == "cuda", ring
        self._calls = driver_for(device)
        self._rings = [self._ring()]
        """Rings by part."""
        self._staged = self._rings[0].take()

    def _ring(self) -> _Ring:
        return _Ring((self._size,), torch.int32, pinned=self._pinned, count=self._num_buffers)

    def stage_int32s(self, part: int = 0) -> NDArray[np.int32]:
        """Return uninitialised host memory [size], from which the next `start_upload` copies.
        `part`: index of the launch within its round."""
        while len(self._rings) <= part:
            self._rings.append(self._ring())
        self._staged = self._rings[part].take()
        words: NDArray[np.int32] = self._staged.array  # type: ignore[assignment]
        return words

    def start_upload(self, out: Tensor) -> None:
        """Copy the first n staged words to `out`, int32 [n], in stream order.

        If `out` was made in inference mode, the caller must be in inference mode, too.
        """
        count, heads = out.shape[0], self._staged.heads
        head = heads.get(count)
        if head is None:
            head = heads[count] = self._staged.tensor[:count]
        self._calls.copy_tensor(out, head)


class HostMirror:
    """Array of int32 words in host memory, and its copy on the device, which `upload_int32s`
    updates."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate `size` words, all 0."""
        self._calls = driver_for(device)
        self._staged = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.array: NDArray[np.int32] = self._staged.numpy()
        """The words in host memory. They must not be written before the last upload is complete."""
        self.words = torch.zeros(size, dtype=torch.int32, device=device)

    def upload_int32s(self, count: int) -> None:
        """Copy the first `count` words to the device, in stream order."""
        self._calls.copy_tensor(self.words[:count], self._staged[:count])


class DownloadBuffer:
    """Fixed host memory for downloads, one buffer per shape and dtype. A result must be used before
    the next download of the same shape and dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._calls = device, driver_for(device)
        self._places: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def start_copy(self, tensor: Tensor) -> None:
        """Begin to copy `tensor` to the host, in stream order."""
        key = (tensor.shape, tensor.dtype)
        place = self._places.get(key)
        if place is None:
            pinned = self._device.type == "cuda"
            with outside_capture(self._device), torch.inference_mode(False):
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._places[key] = place
        self._calls.copy_tensor(place, tensor)

    def wait_copy(self, like: Tensor) -> Tensor:
        """Wait for all work on the current stream, and return the last copy of a tensor with the
        shape and dtype of `like`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._places[like.shape, like.dtype]


class PendingDownload:
    """A tensor whose download is in progress."""

    __slots__ = ("_arrival", "_buffer")

    def __init__(self, buffer: _StagingBuffer, arrival: _Arrival | None) -> None:
        self._buffer, self._arrival = buffer, arrival

    @property
    def has_arrived(self) -> bool:
        """Whether the download is complete."""
        return self._arrival is None or self._arrival.over

    def wait_tensor(self) -> Tensor:
        """Wait for the download, and return the host copy.

        The copy is overwritten by the NUM_STAGING_BUFFERS-th later download of the same part and
        shape, unless it lies in memory given as `last_into` of `Downloader.start_downloads`.
        """
        if self._arrival is not None:
            self._arrival.wait()
        return self._buffer.tensor

    def wait_array(self) -> NDArray[np.generic]:
        """Wait for the download, and return the host copy as a numpy array, which has uint16 bit
        patterns for bfloat16. See `wait_tensor`."""
        if self._arrival is not None:
            self._arrival.wait()
        return self._buffer.array


class _Arrival:
    """Completion event of copies that were started together; queried until it has been waited for
    once."""

    __slots__ = ("_landed",)

    def __init__(self, landed: StreamEvent) -> None:
        self._landed: StreamEvent | None = landed
        landed.record()

    @property
    def over(self) -> bool:
        return self._landed is None or self._landed.is_complete

    def wait(self) -> None:
        if self._landed is not None:
            self._landed.wait()
            self._landed = None


class _Ring:
    """Buffers for tensors of one shape and type."""

    __slots__ = ("_buffers", "_place")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        pinned: bool,
        count: int = NUM_STAGING_BUFFERS,
        calls: DriverInterface | None = None,
    ) -> None:
        """`calls`: driver interface of the device that fills the buffers; None if no copy into them
        must be waited for."""
        marks = [None if calls is None else calls.make_event() for _ in range(count)]
        self._buffers = [_buffer(shape, dtype, mark, pinned=pinned) for mark in marks]
        self._place = 0

    def take(self) -> _StagingBuffer:
        """Return the least recently used buffer."""
        self._place = (self._place + 1) % len(self._buffers)
        return self._buffers[self._place]


class Downloader:
    """Copies tensors from the device to pinned host memory without blocking."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._calls = device.type == "cuda", driver_for(device)
        self._rings: dict[tuple[torch.Size, torch.dtype, int], _Ring] = {}

    @property
    def num_rings(self) -> int:
        """Number of buffer rings, one for each shape, dtype and part."""
        return len(self._rings)

    def start_download(self, tensor: Tensor, part: int = 0) -> PendingDownload:
        """Begin to copy `tensor` to the host, in stream order."""
        return self.start_downloads((tensor,), part)[0]

    def start_downloads(
        self,
        tensors: tuple[Tensor, ...],
        part: int = 0,
        *,
        last_into: NDArray[np.uint8] | None = None,
    ) -> list[PendingDownload]:
        """Begin to copy tensors to the host, in stream order. Waiting for one of the results waits
        for all.

        `part`: index of the launch within its round. `last_into`: pinned memory of the size of the
        last tensor, to which that tensor is copied. Nothing else may write to the memory while the
        result is in use.
        """
        among = tensors if last_into is None else tensors[:-1]
        buffers = [self._copy(tensor, part) for tensor in among]
        if last_into is not None:
            buffers.append(_over(last_into, tensors[-1]))
            self._calls.copy_tensor(buffers[-1].tensor, tensors[-1])
        landed = buffers[0].landed
        arrival = None if landed is None else _Arrival(landed)
        return [PendingDownload(buffer, arrival) for buffer in buffers]

    def _copy(self, tensor: Tensor, part: int) -> _StagingBuffer:
        shape = tensor.shape
        if tensor.nbytes >= _SHARED_BYTES:
            # Pinned memory for each bucket of features would be gigabytes.
            shape = torch.Size((1 << (shape[0] - 1).bit_length(), *shape[1:]))
        key = (shape, tensor.dtype, part)
        ring = self._rings.get(key)
        if ring is None:
            calls = self._calls if self._cuda else None
            ring = _Ring(shape, tensor.dtype, pinned=self._cuda, calls=calls)
            self._rings[key] = ring
        buffer = ring.take()
        if shape != tensor.shape:
            buffer = _in(buffer.tensor[: tensor.shape[0]], buffer.landed)
        self._calls.copy_tensor(buffer.tensor, tensor)
        return buffer


def _over(memory: NDArray[np.uint8], like: Tensor) -> _StagingBuffer:
    """Return `memory` as a buffer for tensors like `like`."""
    return _in(torch.from_numpy(memory).view(like.dtype).view(like.shape), None)


def _buffer(
    shape: tuple[int, ...], dtype: torch.dtype, landed: StreamEvent | None, *, pinned: bool
) -> _StagingBuffer:
    # A tensor made in inference mode could be written in that mode only.
    with torch.inference_mode(False):
        tensor = torch.empty(shape, dtype=dtype, pin_memory=pinned)
    return _in(tensor, landed)


def _in(tensor: Tensor, landed: StreamEvent | None) -> _StagingBuffer:
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return _StagingBuffer(tensor, bits.numpy(), {}, landed)
