"""Pins host memory that was not allocated by torch, so that copies from and to it are
asynchronous."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.transfer.cuda_driver import driver_for

logger = logging.getLogger(__name__)


def pin_memory(memory: NDArray[np.uint8], device: torch.device) -> bool:
    """Pin `memory` until the array is freed, so that copies between it and `device` are
    asynchronous.

    Return whether that succeeded; always True for a CPU. The memory must begin and end at page
    boundaries. Call this from a launching thread (`init_launching_thread`).
    """
    if device.type != "cuda":
        return True
    address = memory.ctypes.data
    if not driver_for(device).pin_memory(address, memory.nbytes):
        logger.warning("memory was not pinned", extra={"bytes": memory.nbytes})
        return False
    # Any thread may free the array last: the CUDA runtime finds the device's context by itself.
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True
