"""Whether drafts and features may pass between devices: auto, on or off."""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"
ON: Final = "on"
OFF: Final = "off"
EXCHANGE_MODES: Final = (AUTO, ON, OFF)
"""Values of the setting `device_exchange`. `auto` means on if the process computes on a GPU."""


def may_exchange(mode: str, device: str) -> bool:
    """Return whether a process that computes on this torch device may exchange data between
    devices."""
    return mode == ON or (mode == AUTO and device.partition(":")[0] == "cuda")
