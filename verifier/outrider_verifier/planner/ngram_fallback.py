"""N-gram (prompt lookup) drafts, used when a drafter is late or less effective.

A lookup in the session's own text (`ngram_index`) costs some microseconds and needs no model. It
replaces a drafter in two cases: a row whose proposal timeout is over verifies it instead of
nothing, and where it is expected to emit more than the drafter's rounds do, the row neither waits
for those nor verifies them. Neither changes the distribution of a session's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from outrider.spec.tree import DraftTree
from outrider.speculation.cost_table import CostTable
from outrider_verifier.model_runner.batch import VerifyDraft
from outrider_verifier.model_runner.results import RowResult
from outrider_verifier.state.ngram_index import NgramFallbackState
from outrider_verifier.state.session import Session

DRAFTER_GAIN: Final = 1.0 / 8.0
"""What a new round of the drafter weighs against all before it."""
MARGIN: Final = 1.1
"""A lookup must be expected to emit so many times what the drafter's rounds do."""
MIN_ACCEPTANCE: Final = 0.25
"""Where costs are not known: a accepted token less often is not worth a row."""


class NgramFallback:
    """Makes n-gram drafts for sessions; engine thread only."""

    def __init__(self, costs: CostTable, *, enabled: bool) -> None:
        """`costs`: forwards by the shape of their round."""
        self._costs, self._enabled = costs, enabled

    def add_session(self, session: Session) -> None:
        """A session begins, or its plan has changed."""
        able = self._enabled and session.plan.is_speculative and not session.in_process_draft_length
        # Of what a lookup finds a grammar may allow nothing.
        if not able or session.constraint is not None:
            session.ngram_fallback = None
        elif session.ngram_fallback is None:
            session.ngram_fallback = NgramFallbackState()

    def propose_better(self, session: Session, nodes_left: int) -> VerifyDraft | None:
        """A draft of up to `nodes_left` nodes for the session's prefix that is expected to emit
        more than its drafter's."""
        ngram_fallback = session.ngram_fallback
        if ngram_fallback is None or not session.prefers_ngram_fallback:
            return None
        return self._draft(session, ngram_fallback, min(_longest(session), nodes_left))

    def propose_for_miss(self, session: Session, rows: int, nodes_left: int) -> VerifyDraft | None:
        """A draft for a row that goes without its drafter's, in a round of `rows` rows with room
        for so many nodes; None: none is found, or plain decoding is faster."""
        ngram_fallback = session.ngram_fallback
        if ngram_fallback is None:
            return None
        longest = min(_longest(session), nodes_left)
        return self._draft(session, ngram_fallback, self._length(ngram_fallback, rows, longest))

    def observe_rows(self, rows: Iterable[RowResult]) -> None:
        """Learn from a round that is settled; while the next one runs, if there can be one."""
        for row in rows:
            session = row.session
            ngram_fallback, verified = session.ngram_fallback, row.verify_row
            if ngram_fallback is None or session.is_speculation_off or session.is_ended:
                continue
            ngram_fallback.lookup.update(session.tokens, session.length)
            if verified is not None and verified.nodes and not verified.ngram_fallback:
                mean = ngram_fallback.drafter_tokens_per_round
                count = float(len(row.tokens))
                ngram_fallback.drafter_tokens_per_round = (
                    count if mean is None else mean + DRAFTER_GAIN * (count - mean)
                )
            ngram_fallback.lookup_is_better = _outdoes(session, ngram_fallback)

    def _draft(
        self, session: Session, ngram_fallback: NgramFallbackState, most: int
    ) -> VerifyDraft | None:
        found = ngram_fallback.lookup.propose(session.tokens, session.length, most)
        return (
            None if found is None else VerifyDraft(tree=DraftTree.chain(found), distribution=None)
        )

    def _length(self, ngram_fallback: NgramFallbackState, rows: int, longest: int) -> int:
        """How many tokens to verify, for the most tokens per second of the row; 0: none."""
        if longest <= 0:
            return 0
        reached = ngram_fallback.lookup.acceptance_by_depth(longest)
        nodes = np.arange(longest + 1, dtype=np.float64)
        # As if every row had as many: who misses a draft seldom misses it alone.
        seconds = self._costs.estimates(rows, nodes * rows)
        if not np.isfinite(seconds).all():
            return int((reached >= MIN_ACCEPTANCE).sum())
        emitted = 1.0 + np.concatenate(([0.0], np.cumsum(reached)))
        return int(np.argmax(emitted / seconds))


def _longest(session: Session) -> int:
    """A round emits one token beyond its draft."""
    return min(session.plan.draft_tokens, session.remaining - 1)


def _outdoes(session: Session, ngram_fallback: NgramFallbackState) -> bool:
    if ngram_fallback.drafter_tokens_per_round is None:
        return False
    expected = 1.0 + float(
        ngram_fallback.lookup.acceptance_by_depth(max(0, _longest(session))).sum()
    )
    return expected > MARGIN * ngram_fallback.drafter_tokens_per_round
