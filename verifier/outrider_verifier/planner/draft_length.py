"""Chooses the draft length of chains for each workload class and load. Pure.

The speculation controller decides whether to draft at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.cost_table import COST_EMA_WEIGHT, CostTable
from outrider.speculation.draft_length import choose_draft_length
from outrider_verifier.planner.workload_stats import WorkloadStats
from outrider_verifier.state.session import NO_LIMIT

REVIEW_ROUNDS: Final = 48
"""Rounds with drafts after which a kind's draft length is chosen anew."""


class DraftLengthChooser:
    """Chooses the draft length from acceptance by depth and forward times.

    Engine thread only.
    """

    def __init__(self, costs: CostTable, verify_s: Callable[[int, int], float | None]) -> None:
        """`costs`: forwards that were seen; `verify_s`: seconds of one over so many rows, of
        so many nodes each, as measured at the start; None where it was not."""
        self._costs, self._verify_s = costs, verify_s
        self._host_s = 0.0
        """What rounds with drafts take outside the target's forward."""

    def observe_host_time(self, host_s: float) -> None:
        """A round with drafts took so many seconds outside the target's forward."""
        self._host_s += COST_EMA_WEIGHT * (max(0.0, host_s) - self._host_s)

    def review_length(self, known: WorkloadStats, load: int, sessions: int) -> bool:
        """Choose the length of a kind's chains at a load of so many sessions, if it is time to;
        whether it is another one now."""
        if known.rounds_since_review < REVIEW_ROUNDS or known.workload_class.top_k != 1:
            return False
        known.rounds_since_review = 0
        known.share_acceptance()
        before, longest = known.draft_limit(load), known.workload_class.draft_tokens
        length = choose_draft_length(
            known.acceptance.acceptance_by_depth(longest),
            partial(self._forward_s, sessions),
            extra_s=known.mean_wait_s + self._host_s,
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
