"""RoundSpans: marks the steps of an exchange's rounds on a device as spans of a timeline."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.exchange.device_clock import DeviceClock
from outrider.engine.kernels.exchange.buffers import ROUND_TIMES

VERIFIER_STEPS: Final = ("wait for drafts", "take drafts", "forward and acceptance", "put rows")
DRAFTER_STEPS: Final = ("wait for a round", "take rows", "draft chains", "put drafts")
_MOMENTS: Final = tuple(
    ROUND_TIMES.index(name) for name in ("wait_begin", "wait_end", "taken", "accepted", "published")
)
"""Indices of the begin of the first step and of the end of each step in a row of the history."""
_BEGIN: Final = ROUND_TIMES.index("wait_begin")
_ROWS: Final = ROUND_TIMES.index("rows")
_WITHOUT_WAIT: Final = 3
"""Index in `_MOMENTS` of the first time that belongs to a round, if the round waits for no data of
the peer."""


class MarkSpan(Protocol):
    """Protocol of a function that marks a span on one track of the timeline, like
    `outrider.timeline.mark_span`."""

    def __call__(self, name: str, began: float, n: int, *, ended: float) -> None:
        """Mark a span from `began` to `ended`, in seconds of `time.perf_counter`. `n`: a number to
        show with the span, here the number of decode rows."""


class RoundSpans:
    """Marks the steps of the rounds of one side of an exchange on a timeline."""

    def __init__(
        self, clock: DeviceClock, steps: tuple[str, str, str, str], mark: MarkSpan
    ) -> None:
        """`steps`: names of the four steps of a round, in order. `mark`: called for each step of
        each round."""
        self._clock, self._steps, self._mark = clock, steps, mark
        self._last_wait = 0

    def mark_round(self, row: NDArray[np.int64]) -> None:
        """Mark the steps of one round. Rounds must be passed in order. row: the round's row of
        `ExchangeState.history`."""
        begin, rows = int(row[_BEGIN]), max(0, int(row[_ROWS]))
        first = _WITHOUT_WAIT if begin == self._last_wait else 0
        self._last_wait = begin
        # A step that the round did not have kept the stamp of an earlier round: it takes no time.
        stamps = np.maximum.accumulate(row[list(_MOMENTS[first:])]).tolist()
        for step, (began, ended) in zip(self._steps[first:], pairwise(stamps), strict=True):
            if ended > began:
                host_time = self._clock.host_time
                self._mark(step, host_time(began), rows, ended=host_time(ended))
