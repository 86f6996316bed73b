"""Estimate of a request's output length from recent outputs. Pure.

A verifier allocates KV cache as a session grows, so admission counts the length that a session is
expected to reach, not its maximum. An estimate that is too small costs a preemption, one that is
too large costs capacity.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

WINDOW_REQUESTS = 512
"""Ended requests that the expectation follows."""
MIN_REQUESTS = 8
"""Fewer comparable requests than this say nothing."""


class OutputLengthEstimator:
    """Estimates output lengths from the lengths of the most recent outputs."""

    def __init__(self, *, assumed: int, quantile: float) -> None:
        """`assumed`: tokens of an answer while too little is known; `quantile`: the share of
        answers that are to be no longer than expected, in (0, 1]."""
        self._assumed = assumed
        self._quantile = quantile
        self._newest: deque[tuple[int, bool]] = deque()
        self._whole: list[int] = []
        """Lengths of answers that ended by themselves, ascending."""
        self._cut: list[int] = []
        """Lengths of those that their bound cut, ascending: as long, or longer."""

    def add_answer(self, emitted: int, bound: int) -> None:
        """An answer has ended with `emitted` tokens, of at most `bound`."""
        if len(self._newest) == WINDOW_REQUESTS:
            length, cut = self._newest.popleft()
            known = self._cut if cut else self._whole
            del known[bisect_right(known, length) - 1]
        entry = emitted, emitted >= bound
        self._newest.append(entry)
        insort(self._cut if entry[1] else self._whole, emitted)

    def expected_len(self, bound: int, emitted: int = 0) -> int:
        """Tokens that an answer of at most `bound` will have which has `emitted` now.

        An answer that a smaller bound cut says nothing of how this one goes on; one that outgrew
        all others is expected to double.
        """
        longer = len(self._whole) - bisect_right(self._whole, emitted)
        at_bound = len(self._cut) - bisect_right(self._cut, bound - 1)
        if longer + at_bound < MIN_REQUESTS:
            guess = max(self._assumed, 2 * emitted)
        else:
            index = int(self._quantile * (longer + at_bound))
            first = len(self._whole) - longer
            guess = self._whole[first + index] if index < longer else bound
        return max(1, min(bound, guess))
