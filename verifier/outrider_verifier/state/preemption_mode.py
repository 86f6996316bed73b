"""PreemptionMode: recompute or swap, the ways in which preempted sessions get their KV back."""

from __future__ import annotations

from enum import StrEnum


class PreemptionMode(StrEnum):
    """Method by which a preempted session gets its KV back."""

    SWAP = "swap"
    """Copied from the host's memory."""
    RECOMPUTE = "recompute"
    """Computed again from its tokens."""
