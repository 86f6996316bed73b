"""Whether a device still works."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


def is_device_usable(device: torch.device) -> bool:
    """False if nothing can be run on the device any more in this process.

    A CUDA error such as an illegal access is sticky: every later call fails with it, until the
    process ends. Waits for all that was launched; to be asked after a failure only.
    """
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:
        logger.exception("device does not work", extra={"device": str(device)})
        return False
    return True
