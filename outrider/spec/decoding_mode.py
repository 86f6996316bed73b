"""Decoding mode of a workload class (plain or speculative), and the reason for it.

A workload class is the set of sessions that share drafter, draft method, draft plan and sampling
settings (`outrider_verifier.planner.workload.WorkloadClass`). The verifier measures both
modes for each class and uses the faster one.
"""

from __future__ import annotations

from enum import StrEnum


class DecodingMode(StrEnum):
    """Decoding mode of a workload class's sessions: plain or speculative."""

    PLAIN = "plain"
    """Emit one token per round, without drafts."""
    SPECULATE = "speculate"
    """Verify drafts in each round."""

    @property
    def other(self) -> DecodingMode:
        """The other of the two modes."""
        return DecodingMode.PLAIN if self is DecodingMode.SPECULATE else DecodingMode.SPECULATE


class DecodingModeReason(StrEnum):
    """Reason why a workload class uses its present mode."""

    MEASURING = "measuring"
    """Too few rounds were measured to compare the modes."""
    FASTER = "faster"
    """The mode emits more tokens per second than the other."""
    PROBE = "probe"
    """The mode is measured for a few rounds, in case it has become faster than the other."""
