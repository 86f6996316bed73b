"""Decides whether drafted sessions share a round or alternate in two half-batches. Pure.

In a shared round, target and drafter wait for each other: the round takes the time of a forward
pass over all rows plus the drafter's response time. With two half-batches, one half is verified
while the drafter drafts for the other half. This hides the drafter's time, but the weights are read
twice for the same number of tokens. The faster choice follows from the times that were measured at
startup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MIN_SESSIONS: Final = 4
"""Minimum number of sessions for half-batches. Times of smaller half-batches are not measured."""
MIN_SWITCH_GAIN: Final = 0.95
"""Maximum time of the other choice, relative to the present choice, at which the choice changes."""


class TwoBatchOverlap:
    """Chooses before each round between a shared round and two half-batches, with hysteresis."""

    def __init__(self, verify_s: Callable[[int, int], float | None]) -> None:
        """Create the chooser. `verify_s` maps a number of rows and a number of nodes per row to the
        time of a forward pass in seconds; None if it was not measured."""
        self._verify_s = verify_s
        self.in_force = False

    def max_rows_of_half(self, rows: int, nodes: int, answer_s: float) -> int | None:
        """Return the maximum number of rows of a half-batch; None if all sessions should share a
        round. `rows` is the number of drafted sessions, and `nodes` is the number of nodes of each,
        including the root. `answer_s` is the mean time from the end of a round to the arrival of
        its proposals, in seconds; 0 if unknown."""
        half = -(-rows // 2)
        if rows < MIN_SESSIONS or not answer_s:
            self.in_force = False
            return None
        whole_s, half_s = self._verify_s(rows, nodes), self._verify_s(half, nodes)
        if whole_s is None or half_s is None:
            self.in_force = False
            return None
        shared_s = whole_s + answer_s
        turns_s = max(2.0 * half_s, half_s + answer_s)
        if self.in_force:
            self.in_force = turns_s * MIN_SWITCH_GAIN < shared_s
        else:
            self.in_force = turns_s < MIN_SWITCH_GAIN * shared_s
        return half if self.in_force else None
