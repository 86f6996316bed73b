"""Memory that two processes of one host share, and that kernels of both their devices reach.

*Device memory* lies on the device of one process. The other process maps it for its own device,
over NVLink or PCIe peer access. It is allocated by CUDA's virtual memory management and passed on
as a file descriptor, so it remains valid after the process that allocated it has ended. *Host
memory*, for devices without peer access, lies in pinned pages that both devices map. On a CPU it is
plain shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import torch

from outrider.engine.device.exchange.layout import NUMBER_BYTES, BufferLayout
from outrider.engine.kernels.exchange.buffers import ExchangeBuffer
from outrider.errors import InvalidMessageError, UnavailableError

_LIBRARY: Final = "libcuda.so.1"
_PINNED: Final = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
_ON_DEVICE: Final = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
_FILE_DESCRIPTOR: Final = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""
_READ_WRITE: Final = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_PORTABLE_MAPPED: Final = 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory(Protocol):
    """Memory that a drafter and a verifier share, as mapped by one of the two processes."""

    @property
    def address(self) -> int:
        """Address of the memory as kernels of this process's device use it (on a CPU, as its
        threads do)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        ...

    def make_descriptor(self) -> int:
        """Return a new file descriptor to pass to the peer. The caller must close it. Only the
        process that allocated the memory can make one."""
        ...

    def close(self) -> None:
        """Unmap the memory in this process. No work that uses it may be running. Idempotent."""
        ...


def allocate_on_device(num_bytes: int, device: torch.device) -> SharedMemory:
    """Allocate zeroed memory of `device` for a peer to write to. Raises UnavailableError if the
    driver cannot allocate or share it."""
    return _DeviceMemory.allocate(num_bytes, device)


def map_device_memory(descriptor: int, num_bytes: int, device: torch.device) -> SharedMemory:
    """Map memory of another device or process for kernels of `device`. The caller remains the owner
    of the descriptor. Raises UnavailableError if `device` cannot access the memory or if the memory
    is smaller than `num_bytes`."""
    return _DeviceMemory.from_descriptor(descriptor, num_bytes, device)


def allocate_on_host(num_bytes: int, device: torch.device) -> SharedMemory:
    """Allocate zeroed host memory that `device` and a peer's device can map. Raises
    UnavailableError if that fails."""
    descriptor = os.memfd_create("outrider-exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, _whole_pages(num_bytes))
        # A peer must not be able to take the pages away under a read.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return _HostMemory(os.dup(descriptor), num_bytes, device)
    finally:
        os.close(descriptor)


def map_host_memory(descriptor: int, num_bytes: int, device: torch.device) -> SharedMemory:
    """Map host memory that a peer allocated. The caller remains the owner of the descriptor. Raises
    InvalidMessageError if the memory is smaller than `num_bytes` or if the peer could shrink it,
    and UnavailableError if `device` cannot map it."""
    try:
        size = os.fstat(descriptor).st_size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidMessageError(f"no memory to exchange by: {error}") from None
    if size < num_bytes or not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidMessageError(
            f"memory to exchange by must have {num_bytes} bytes or more and a seal against "
            f"shrinking, got {size} bytes and seals {seals}"
        )
    return _HostMemory(os.dup(descriptor), num_bytes, device)


def allocate_memory(num_bytes: int, device: torch.device, *, on_device: bool) -> SharedMemory:
    """Allocate zeroed memory of the device or the host for a peer to write to. Raises
    UnavailableError if that fails."""
    return (allocate_on_device if on_device else allocate_on_host)(num_bytes, device)


def map_memory(
    descriptor: int, num_bytes: int, device: torch.device, *, on_device: bool
) -> SharedMemory:
    """Map memory that a peer allocated. The caller remains the owner of the descriptor. Raises the
    errors of `map_device_memory` or `map_host_memory`."""
    return (map_device_memory if on_device else map_host_memory)(descriptor, num_bytes, device)


def new_buffer(layout: BufferLayout, device: torch.device) -> ExchangeBuffer:
    """Return a buffer that has no memory yet. `attach_buffer` gives it memory."""
    with torch.inference_mode(False):
        addresses = torch.zeros(1 + len(layout.fields), dtype=torch.int64, device=device)
    return ExchangeBuffer(addresses, layout.depth, layout.bank_bytes)


def attach_buffer(buffer: ExchangeBuffer, layout: BufferLayout, memory: SharedMemory) -> None:
    """Give `memory` to a buffer: kernels launched later in the current stream use it. On a CPU the
    buffer's views must not be used after the memory is closed."""
    start = memory.address
    first = start + NUMBER_BYTES
    words = [start, *(first + each.offset for each in layout.fields)]
    buffer.addresses.copy_(torch.tensor(words, dtype=torch.int64))
    buffer.views.clear()
    if buffer.addresses.is_cuda:
        return
    pages = (ctypes.c_ubyte * memory.num_bytes).from_address(start)
    whole = torch.from_numpy(np.frombuffer(memoryview(pages), np.uint8))
    for bank in range(layout.depth):
        arrays = [whole[:4].view(torch.int32)]
        for each in layout.fields:
            begin = NUMBER_BYTES + bank * layout.bank_bytes + each.offset
            part = whole[begin : begin + each.num_bytes]
            arrays.append(part.view(each.dtype).view(each.shape))
        buffer.views.append(tuple(arrays))


def detach_buffer(buffer: ExchangeBuffer) -> None:
    """Take the memory away from a buffer, in order of the current stream. The exchange that uses
    the buffer must have been closed before."""
    buffer.addresses.zero_()
    buffer.views.clear()


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class _Driver:
    """Calls functions of the CUDA driver by name. Raises UnavailableError if a call fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise UnavailableError(
                f"no CUDA driver: {error}", reason="NO_DEVICE_EXCHANGE"
            ) from None

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver."""
        function = getattr(self._library, name, None)
        if function is None:
            raise UnavailableError(f"the CUDA driver has no {name}", reason="NO_DEVICE_EXCHANGE")
        code: int = function(*args)
        if code:
            raise UnavailableError(
                f"{name} failed with CUDA error {code}", reason="NO_DEVICE_EXCHANGE"
            )


@cache
def _driver() -> _Driver:
    return _Driver()


class _DeviceMemory:
    """Memory allocated by cuMemCreate and mapped into this process's address space."""

    def __init__(self, handle: c_ulonglong, num_bytes: int, size: int, device: int) -> None:
        """Take ownership of the handle. `size`: size of the allocation, a multiple of the
        granularity."""
        self.num_bytes, self._size, self._handle = num_bytes, size, handle
        self._address, self._is_mapped = c_ulonglong(), False
        self._is_closed = False
        driver = _driver()
        try:
            driver.call(
                "cuMemAddressReserve",
                byref(self._address),
                c_size_t(size),
                c_size_t(0),
                c_ulonglong(0),
                c_ulonglong(0),
            )
            driver.call(
                "cuMemMap", self._address, c_size_t(size), c_size_t(0), handle, c_ulonglong(0)
            )
            self._is_mapped = True
            access = _AccessDescription(_Location(_ON_DEVICE, device), _READ_WRITE)
            driver.call("cuMemSetAccess", self._address, c_size_t(size), byref(access), c_size_t(1))
        except BaseException:
            self.close()
            raise

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> _DeviceMemory:
        """See `allocate_on_device`."""
        index = _index(device)
        handle, properties = c_ulonglong(), _properties(index)
        size = _whole_granules(num_bytes, properties)
        driver = _driver()
        driver.call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_ulonglong(0))
        memory = cls(handle, num_bytes, size, index)
        driver.call("cuMemsetD8_v2", memory._address, c_ubyte(0), c_size_t(size))
        torch.cuda.synchronize(device)
        return memory

    @classmethod
    def from_descriptor(
        cls, descriptor: int, num_bytes: int, device: torch.device
    ) -> _DeviceMemory:
        """See `map_device_memory`."""
        index, handle = _index(device), c_ulonglong()
        _driver().call(
            "cuMemImportFromShareableHandle",
            byref(handle),
            c_void_p(descriptor),
            c_int(_FILE_DESCRIPTOR),
        )
        return cls(handle, num_bytes, _whole_granules(num_bytes, _properties(index)), index)

    @property
    def address(self) -> int:
        """See `SharedMemory`."""
        return self._address.value

    def make_descriptor(self) -> int:
        """See `SharedMemory`."""
        descriptor = c_int(-1)
        _driver().call(
            "cuMemExportToShareableHandle",
            byref(descriptor),
            self._handle,
            c_int(_FILE_DESCRIPTOR),
            c_ulonglong(0),
        )
        return descriptor.value

    def close(self) -> None:
        """See `SharedMemory`."""
        if self._is_closed:
            return
        self._is_closed = True
        driver, size = _driver(), c_size_t(self._size)
        with contextlib.suppress(UnavailableError):
            if self._is_mapped:
                driver.call("cuMemUnmap", self._address, size)
            if self._address.value:
                driver.call("cuMemAddressFree", self._address, size)
        with contextlib.suppress(UnavailableError):
            driver.call("cuMemRelease", self._handle)


class _HostMemory:
    """A mapping of a memory file, pinned and mapped for a CUDA device."""

    def __init__(self, descriptor: int, num_bytes: int, device: torch.device) -> None:
        """Take ownership of the descriptor."""
        self.num_bytes, self._descriptor = num_bytes, descriptor
        self._size = _whole_pages(num_bytes)
        self._pages: mmap.mmap | None = None
        self._is_registered = False
        try:
            self._pages = mmap.mmap(descriptor, self._size)
            self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
            self.address = self._host
            if device.type == "cuda":
                self.address = self._register()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise UnavailableError(
                    f"memory of the host could not be mapped: {error}", reason="NO_DEVICE_EXCHANGE"
                ) from None
            raise

    def _register(self) -> int:
        driver, found = _driver(), c_ulonglong()
        driver.call(
            "cuMemHostRegister_v2",
            c_void_p(self._host),
            c_size_t(self._size),
            c_uint(_PORTABLE_MAPPED),
        )
        self._is_registered = True
        driver.call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(self._host), c_uint(0))
        return found.value

    def make_descriptor(self) -> int:
        """See `SharedMemory`."""
        return os.dup(self._descriptor)

    def close(self) -> None:
        """See `SharedMemory`. The pages stay mapped as long as a tensor uses them."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._is_registered:
            self._is_registered = False
            with contextlib.suppress(UnavailableError):
                _driver().call("cuMemHostUnregister", c_void_p(self._host))


def _index(device: torch.device) -> int:
    index = torch.cuda.current_device() if device.index is None else device.index
    # The driver's calls need the context that torch makes when it is used first. Other streams may
    # wait for peers, so that nothing here waits for the whole device.
    torch.cuda.current_stream(index).synchronize()
    return index


def _properties(device: int) -> _AllocationProperties:
    return _AllocationProperties(
        type=_PINNED, handle_types=_FILE_DESCRIPTOR, location=_Location(_ON_DEVICE, device)
    )


def _whole_granules(num_bytes: int, properties: _AllocationProperties) -> int:
    granule = c_size_t()
    _driver().call("cuMemGetAllocationGranularity", byref(granule), byref(properties), c_int(0))
    return -(-num_bytes // granule.value) * granule.value


def _whole_pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
