"""CUDA driver calls that keep the GIL, for the thread that launches rounds.

Torch releases the GIL during every device call, if only for microseconds. The launching thread
makes about six such calls a round. Each of them lets a busy event loop take the GIL, which the loop
releases only when it has nothing left to do. In a round of 2.7 ms the launching thread waited more
than 1 ms for the GIL (decision 9). The calls of a round (graph launch, copies to and from pinned
memory, events) are therefore made here with the GIL held; only waiting for the device releases it.

Without a usable driver, and on a CPU, the same interface is implemented with torch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LIBRARY: Final = "libcuda.so.1"
_NO_TIMING: Final = 2
"""CU_EVENT_DISABLE_TIMING."""
_PORTABLE: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE."""
_NOT_READY: Final = 600
"""CUDA_ERROR_NOT_READY."""


class StreamEvent(Protocol):
    """A recorded position in a stream."""

    def record(self) -> None:
        """Record the event after all work launched so far in the current stream."""

    @property
    def is_complete(self) -> bool:
        """Whether the device has reached the event; True if it was never recorded."""
        ...

    def wait(self) -> None:
        """Wait until the device has reached the event."""


class DriverInterface(Protocol):
    """Non-blocking device calls of a launching thread, in the order of its current stream."""

    def prepare(self, graph: torch.cuda.CUDAGraph) -> Any:
        """Return the argument of `launch` for a captured graph. The caller must keep the graph
        alive."""

    def launch(self, prepared: Any) -> None:
        """Replay a prepared graph. A graph must not use torch's random numbers, because every
        replay may draw the same ones."""

    def copy_tensor(self, to: Tensor, source: Tensor) -> None:
        """Copy `source` to `to`, which has the same size and dtype. One of them is in pinned
        memory, which must stay valid until the copy is complete."""

    def copy_array(self, to: Tensor, source: NDArray[np.generic]) -> None:
        """Copy the bytes of `source`, a contiguous array that may be read-only, to `to`, which has
        the same size.

        `source` must stay valid until the copy is complete. The call does not wait if `source` is
        in pinned memory.
        """

    def make_event(self) -> StreamEvent:
        """Return a new event."""
        ...

    def pin_memory(self, address: int, size: int) -> bool:
        """Pin `size` bytes of host memory at `address`, both multiples of the page size. Return
        whether that succeeded."""
        ...


class DriverError(RuntimeError):
    """Error of a failed driver call. After a device is lost, every later call fails, too."""


class _DriverMark:
    __slots__ = ("_driver", "_event")

    def __init__(self, driver: DriverCalls) -> None:
        self._driver, self._event = driver, ctypes.c_void_p()
        code = driver.under_lock.cuEventCreate(ctypes.byref(self._event), _NO_TIMING)
        driver.check(code, "cuEventCreate")

    def record(self) -> None:
        driver = self._driver
        driver.check(
            driver.under_lock.cuEventRecord(self._event, current_stream()), "cuEventRecord"
        )

    @property
    def is_complete(self) -> bool:
        driver = self._driver
        code = driver.under_lock.cuEventQuery(self._event)
        if code == _NOT_READY:
            return False
        driver.check(code, "cuEventQuery")
        return True

    def wait(self) -> None:
        if not self.is_complete:
            driver = self._driver
            driver.check(driver.without_lock.cuEventSynchronize(self._event), "cuEventSynchronize")

    def __del__(self) -> None:
        # At the end of the process there may be no driver any more; nothing is left to free then.
        self._driver.under_lock.cuEventDestroy_v2(self._event)


class DriverCalls:
    """`DriverInterface` implemented with the CUDA driver. The calling thread must have a current
    device (`init_launching_thread`)."""

    def __init__(self) -> None:
        """Load the driver. Raises OSError or AttributeError if there is no usable driver."""
        self.under_lock, self.without_lock = ctypes.PyDLL(_LIBRARY), ctypes.CDLL(_LIBRARY)
        pointer, words = ctypes.c_void_p, ctypes.c_size_t
        self.under_lock.cuGraphLaunch.argtypes = (pointer, pointer)
        self.under_lock.cuMemcpyAsync.argtypes = (pointer, pointer, words, pointer)
        self.without_lock.cuMemHostRegister_v2.argtypes = (pointer, words, ctypes.c_uint)
        self.under_lock.cuEventCreate.argtypes = (pointer, ctypes.c_uint)
        self.under_lock.cuEventRecord.argtypes = (pointer, pointer)
        for library, name in (
            (self.under_lock, "cuEventQuery"),
            (self.under_lock, "cuEventDestroy_v2"),
            (self.without_lock, "cuEventSynchronize"),
        ):
            getattr(library, name).argtypes = (pointer,)

    @staticmethod
    def check(code: int, name: str) -> None:
        """Raise DriverError if `code`, the result of the driver function `name`, is an error."""
        if code:
            raise DriverError(f"{name}: CUDA error {code}")

    def prepare(self, graph: torch.cuda.CUDAGraph) -> int:
        """See `DriverInterface`."""
        return graph.raw_cuda_graph_exec()

    def launch(self, prepared: int) -> None:
        """See `DriverInterface`."""
        self.check(self.under_lock.cuGraphLaunch(prepared, current_stream()), "cuGraphLaunch")

    def copy_tensor(self, to: Tensor, source: Tensor) -> None:
        """See `DriverInterface`."""
        if not (to.is_contiguous() and source.is_contiguous()):
            _BY_TORCH.copy_tensor(to, source)
            return
        self._copy(to, source.data_ptr(), source.nbytes)

    def copy_array(self, to: Tensor, source: NDArray[np.generic]) -> None:
        """See `DriverInterface`."""
        if not (to.is_contiguous() and source.flags.c_contiguous):
            raise ValueError("a copy from or to what lies in pieces")
        self._copy(to, source.ctypes.data, source.nbytes)

    def _copy(self, to: Tensor, address: int, size: int) -> None:
        if to.nbytes != size:
            raise ValueError(f"a copy of {size} bytes to {to.nbytes}")
        code = self.under_lock.cuMemcpyAsync(to.data_ptr(), address, size, current_stream())
        self.check(code, "cuMemcpyAsync")

    def make_event(self) -> StreamEvent:
        """See `DriverInterface`."""
        return _DriverMark(self)

    def pin_memory(self, address: int, size: int) -> bool:
        """See `DriverInterface`. The driver is called directly, because the CUDA runtime would
        report an error of this call again at the next kernel launch."""
        return not self.without_lock.cuMemHostRegister_v2(address, size, _PORTABLE)


class _TorchMark:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record()

    @property
    def is_complete(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class TorchCalls:
    """`DriverInterface` implemented with torch."""

    def prepare(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
        """See `DriverInterface`."""
        return graph

    def launch(self, prepared: torch.cuda.CUDAGraph) -> None:
        """See `DriverInterface`."""
        prepared.replay()

    def copy_tensor(self, to: Tensor, source: Tensor) -> None:
        """See `DriverInterface`."""
        to.copy_(source, non_blocking=True)

    def copy_array(self, to: Tensor, source: NDArray[np.generic]) -> None:
        """See `DriverInterface`."""
        # A tensor of what is read-only is warned of, whatever is done with it.
        owned = source if source.flags.writeable else source.copy()
        to.copy_(torch.from_numpy(owned).view(to.dtype).view(to.shape), non_blocking=True)

    def make_event(self) -> StreamEvent:
        """See `DriverInterface`."""
        return _TorchMark()

    def pin_memory(self, address: int, size: int) -> bool:
        """Return False, because torch can only pin memory that it allocates itself."""
        return False


def driver_for(device: torch.device) -> DriverInterface:
    """Return the driver interface for calls of this thread on `device`. If `device` is not the
    current device of the thread, it is torch's implementation, which works for any device."""
    if device.type != "cuda" or device.index not in (None, torch.cuda.current_device()):
        return _BY_TORCH
    return cuda_interface()


@cache
def cuda_interface() -> DriverInterface:
    """Return the driver interface of CUDA devices: the CUDA driver if torch and the driver support
    it, otherwise torch."""
    if torch.version.cuda is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        return _BY_TORCH
    try:
        return DriverCalls()
    except (OSError, AttributeError):
        return _BY_TORCH


_BY_TORCH: Final = TorchCalls()


def current_stream() -> int:
    """Return the handle of the current stream of the current device, by a fast internal function of
    torch."""
    raw: int = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return raw
