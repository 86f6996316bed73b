"""PreemptionMode: recompute or swap, the ways in which preempted sessions get their K/V back."""

from __future__ import annotations

from enum import StrEnum


class PreemptionMode(StrEnum):
    """Method by which a preempted session gets its K/V back."""

    SWAP = "swap"
    """Copied from the host's memory."""
    RECOMPUTE = "recompute"
    """Computed again from its tokens."""
