"""Setting of the device exchange, which passes drafts and features through GPU memory: auto, on or
off."""

from __future__ import annotations

from typing import Final

AUTO: Final = "auto"
ON: Final = "on"
OFF: Final = "off"
EXCHANGE_MODES: Final = (AUTO, ON, OFF)
"""Values of the setting `device_exchange`. The value `auto` means on if the process computes on a
GPU, else off."""


def may_exchange(mode: str, device: str) -> bool:
    """Return whether a process with the setting `mode` that computes on the torch device `device`
    may use the device exchange."""
    return mode == ON or (mode == AUTO and device.partition(":")[0] == "cuda")
