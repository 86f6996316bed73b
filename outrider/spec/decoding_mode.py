"""Decoding mode of a workload class (plain or speculative), and the reason for it. Pure."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Decoding mode of a workload class."""

    PLAIN = "plain"
    SPECULATE = "speculate"

    @property
    def other(self) -> Mode:
        """The one that this is not."""
        return Mode.PLAIN if self is Mode.SPECULATE else Mode.SPECULATE


class DecodingModeReason(StrEnum):
    """Reason for which a mode is in force."""

    MEASURING = "measuring"
    """Too little is known."""
    FASTER = "faster"
    """It emits more tokens per second than the other."""
    PROBE = "probe"
    """To see whether it has become faster than the other, for a few rounds."""
