"""How many levels of a kind's chains are worth verifying, at each load (pure).

Whether to draft at all is for the contest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.cost_table import GAIN, CostTable
from outrider.speculation.draft_length import choose_length
from outrider_verifier.planner.workload_stats import Known
from outrider_verifier.state.session import NO_LIMIT

REVIEW_ROUNDS: Final = 48
"""Rounds with drafts after which a kind's draft length is chosen anew."""


class Lengths:
    """Chooses them; engine thread only."""

    def __init__(self, costs: CostTable, verify_s: Callable[[int, int], float | None]) -> None:
        """`costs`: forwards that were seen; `verify_s`: seconds of one over so many rows, of so
        many nodes each, as measured at the start; None where it was not."""
        self._costs, self._verify_s = costs, verify_s
        self._host_s = 0.0
        """What rounds with drafts take outside the target's forward."""

    def observe(self, host_s: float) -> None:
        """A round with drafts took so many seconds outside the target's forward."""
        self._host_s += GAIN * (max(0.0, host_s) - self._host_s)

    def review(self, known: Known, load: int, sessions: int) -> bool:
        """Choose the length of a kind's chains at a load of so many sessions, if it is time to;
        whether it is another one now."""
        if known.review < REVIEW_ROUNDS or known.kind.top_k != 1:
            return False
        known.review = 0
        known.share()
        before, longest = known.limit(load), known.kind.draft_tokens
        length = choose_length(
            known.acceptance.reached(longest),
            partial(self._forward_s, sessions),
            extra_s=known.waits_s + self._host_s,
            present=min(before, longest),
        )
        known.limits[load] = limit = NO_LIMIT if length >= longest else length
        return limit != before

    def _forward_s(self, rows: int, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [n] -> [n]: a forward over `rows` chains, by their length."""
        measured = [self._verify_s(rows, 1 + int(length)) for length in lengths]
        if None in measured:
            return self._costs.estimates(rows, lengths * np.float64(rows))
        return np.asarray(measured, dtype=np.float64)
