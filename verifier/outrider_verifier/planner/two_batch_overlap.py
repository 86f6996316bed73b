"""Decides whether drafted sessions share a round or alternate in two half-batches. Pure.

In a shared round target and drafter wait for each other: it takes the forward pass over all rows,
then the drafter's answer. With two half-batches, one is verified while the other is drafted for:
the drafter's time is overlapped, but the weights are read twice for as many tokens. The times
measured at startup decide which is shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MIN_SESSIONS: Final = 4
"""Fewer sessions than this always share: there is no table that fine."""
MIN_SWITCH_GAIN: Final = 0.95
"""How much shorter the other way must be to change to it."""


class TwoBatchOverlap:
    """Chooses between one round and two half-batches before each round, with hysteresis."""

    def __init__(self, verify_s: Callable[[int, int], float | None]) -> None:
        """`verify_s`: seconds of a forward over so many rows, of so many nodes each; None
        where that was not measured."""
        self._verify_s = verify_s
        self.in_force = False

    def max_rows_of_half(self, rows: int, nodes: int, answer_s: float) -> int | None:
        """Rows of a half; None: all share a round. `rows` drafted sessions of `nodes` nodes each,
        the root included; `answer_s`: time from the end of a round to the arrival of its
        proposals; 0 if unknown."""
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
