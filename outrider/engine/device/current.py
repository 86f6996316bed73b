"""The device that a thread launches on."""

from __future__ import annotations

import torch


def make_current(device: torch.device | str) -> None:
    """Let this thread launch kernels on `device`: CUDA keeps a current device for every thread,
    and a Triton kernel can only be launched on that one. Nothing to do for a CPU."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
