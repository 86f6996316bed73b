"""Idle time of the verifier's device before rounds whose drafts come from another device.

The idle time before a round is the time from the end of acceptance in the previous round to the
beginning of the round's forward pass, by the clock of the verifier's device, minus the time that
the drafter's kernels took. What remains is the cost of the exchange: accepted rows and drafts are
written, transferred, read and checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.exchange.round_history import RoundHistory
from outrider.engine.device.exchange.round_spans import RoundSpans
from outrider.engine.kernels.exchange.buffers import ROUND_TIMES

_BEGIN, _END, _TAKEN, _ACCEPTED, _DRAFTING, _HITS, _ROWS, _NUMBER = (
    ROUND_TIMES.index(name)
    for name in (
        "wait_begin",
        "wait_end",
        "taken",
        "accepted",
        "drafting_ns",
        "hits",
        "rows",
        "number",
    )
)
_LONGEST_NS: Final = 10**9
"""Drafting time in nanoseconds from which a round is ignored. The drafter reports it, so it may be
wrong."""


class ExchangedRound(NamedTuple):
    """Times of one round that verified drafts of another device, in seconds. `idle_s` is the idle
    time before the round, without the drafting time `drafting_s`."""

    rows: int
    """Number of decode rows, including padding of the bucket."""
    idle_s: float
    drafting_s: float
    """Time of the drafter's kernels; 0 if all drafts had been made before the round began."""
    hits: int
    """Number of sessions whose draft had been made by look-ahead for the outcome that the previous
    round had."""
    waited_s: float
    """Time that the round waited for drafts."""


class ExchangeTimes:
    """Reads the times of the rounds of an exchange on the verifier's side, each round once."""

    def __init__(self, history: NDArray[np.int64]) -> None:
        """`history`: see `RoundHistory`."""
        self._history = RoundHistory(history)
        self.spans: RoundSpans | None = None
        """Object that marks each round on the timeline; None to mark nothing."""
        self.answered = 0
        """Number of rounds so far that looked for drafts and found some. Rounds whose times were
        overwritten before they were read are not counted."""
        self.late = 0
        """Number of rounds so far that waited for drafts and found none. Rounds whose times were
        overwritten before they were read are not counted."""
        self.hits = 0
        """Number of verified drafts so far that had been made by look-ahead for the outcome that
        the previous round had."""
        self._last: NDArray[np.int64] | None = None

    def take_rounds(self) -> Iterator[ExchangedRound]:
        """Yield the rounds since the last call, oldest first. Some rounds are left out: those
        without drafts, those with another number of rows than the round before, those with an
        impossible drafting time, and those whose times, or the times of the round before, were
        overwritten before they were read."""
        for row in self._history.take_rows():
            if self.spans is not None:
                self.spans.mark_round(row)
            last, self._last = self._last, row
            if last is None or row[_BEGIN] != last[_BEGIN]:
                # A round that only prefills looks for no drafts, and keeps the stamps of the last
                # one that did.
                is_answered = bool(row[_DRAFTING]) or bool(row[_HITS])
                self.answered += is_answered
                self.late += not is_answered
                self.hits += int(row[_HITS])
            if last is not None and row[_NUMBER] == last[_NUMBER] + 1:
                found = _round(last, row)
                if found is not None:
                    yield found

    def forget(self) -> None:
        """Clear the history. Call this before the rounds of another exchange."""
        self._history.forget()
        self._last = None


def _round(before: NDArray[np.int64], row: NDArray[np.int64]) -> ExchangedRound | None:
    rows, drafting = int(row[_ROWS]), int(row[_DRAFTING])
    hits = int(row[_HITS])
    is_drafted = 0 < drafting < _LONGEST_NS or (drafting == 0 and hits > 0)
    if rows < 1 or rows != before[_ROWS] or not is_drafted:
        return None
    idle = int(row[_TAKEN] - before[_ACCEPTED]) - drafting
    if idle < 0:
        # The drafter says that it drafted longer than there was time.
        return None
    waited = int(row[_END] - row[_BEGIN])
    return ExchangedRound(rows, idle * 1e-9, drafting * 1e-9, hits, waited * 1e-9)
