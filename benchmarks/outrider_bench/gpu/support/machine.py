"""Constants of the GPU machine for benchmarks; imports nothing that needs a GPU."""

from __future__ import annotations

from typing import Final

DEVICE_COPY_BYTES_S: Final = 4.3e12
"""Bytes per second of a device copy on an H200. The shortest possible time of a forward pass is
computed from it."""
BUSY_POLLING_CORES: Final = 3
"""Number of busy-polling cores of each process that serves over gRPC: for its event loop, its
worker thread and gRPC's own thread."""
