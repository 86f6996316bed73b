"""PreemptionMode: recompute or swap, the ways in which preempted sessions get their KV back."""

from __future__ import annotations

from enum import StrEnum


class PreemptionMode(StrEnum):
    """Method by which a preempted session gets its KV back when it resumes."""

    SWAP = "swap"
    """The KV is copied back from host memory."""
    RECOMPUTE = "recompute"
    """The KV is computed again from the session's tokens."""
