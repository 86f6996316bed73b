"""Pins host memory that another owner allocated, so that device copies of it are asynchronous."""

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
    """Have copies between `memory` and a device be no wait for whoever starts them, until nobody
    looks at the array any more; it must begin and end with pages of the system. Whether that was
    possible: always so for a CPU, whose copies are over when they have begun. To be called by a
    thread that launches (`init_launching_thread`)."""
    if device.type != "cuda":
        return True
    address = memory.ctypes.data
    if not driver_for(device).pin_memory(address, memory.nbytes):
        logger.warning("memory was not pinned", extra={"bytes": memory.nbytes})
        return False
    # Whatever thread lets go of it last: the runtime finds the device's context by itself.
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return True
