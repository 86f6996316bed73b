"""Checks whether devices are usable, and sets the current device of a thread."""

from __future__ import annotations

import importlib.util
import logging

import torch

from outrider.errors import FailedPreconditionError, InvalidRequestError

logger = logging.getLogger(__name__)


def is_device_usable(device: torch.device) -> bool:
    """Return whether this process can still run work on the device.

    A CUDA error such as an illegal access is sticky: every later call fails with it, until the
    process ends. The check waits for all launched work, so call this function only after a failure.
    """
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:
        logger.exception("device does not work", extra={"device": str(device)})
        return False
    return True


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, or an empty string for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_device(name: str) -> None:
    """Raise an error if this installation cannot compute on the device `name`.

    Raises InvalidRequestError (reason INVALID_CONFIG) if `name` is not a device name, and
    FailedPreconditionError (reasons NO_DEVICE, NO_KERNELS) if the device or its kernels are
    unavailable.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequestError(f"device: {error}", reason="INVALID_CONFIG") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        built = "" if torch.version.cuda else ", and this torch is built without it"
        raise FailedPreconditionError(
            f"device {name} is not there: CUDA has {torch.cuda.device_count()}{built}",
            reason="NO_DEVICE",
        )
    if device.type != "cpu":
        check_kernels()


def check_kernels() -> None:
    """Raise FailedPreconditionError (reason NO_KERNELS) if Triton, which the kernels need, is not
    installed."""
    if importlib.util.find_spec("triton") is None:
        raise FailedPreconditionError(
            "this needs triton, which is not installed: pip install 'outrider[engine]'",
            reason="NO_KERNELS",
        )


def set_current_device(device: torch.device | str) -> None:
    """Make `device` the current CUDA device of this thread. Does nothing for a CPU or for a device
    without an index.

    CUDA keeps a current device for each thread, and a Triton kernel can only be launched on the
    current device.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def init_launching_thread(device: torch.device | str) -> None:
    """Prepare this thread to launch rounds or drafts on `device`; call it once per thread.

    If the device is not a CPU, this limits torch to one CPU thread. With more threads, torch would
    wake its thread pool to copy more than 32,768 elements of host memory, which took up to 5 ms on
    a virtual machine.
    """
    set_current_device(device)
    device = torch.device(device)
    if device.type == "cuda":
        # This binds the device's context to the thread, which driver calls require.
        torch.cuda.synchronize(device)
    if device.type != "cpu":
        torch.set_num_threads(1)
