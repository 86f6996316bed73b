"""Constants of the GPU machine for benchmarks; imports nothing that needs a GPU."""

from __future__ import annotations

from typing import Final

DEVICE_COPY_BYTES_S: Final = 4.3e12
"""Rate of a device copy on an H200, for the floor: bytes of weights over it."""
BUSY_POLLING_CORES: Final = 3
"""Busy-polling cores of each process that serves over gRPC: for its event loop, its working thread
and gRPC's own thread."""
