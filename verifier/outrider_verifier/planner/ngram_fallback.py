"""Drafts that this process makes where a drafter's are missing, or are the worse ones.

A lookup in the session's own text (`lookup`) costs some microseconds and needs no model. It stands
in for a drafter in two places: a row whose patience is over verifies it instead of nothing, and
where it is expected to emit more than the drafter's rounds do, the row neither waits for those nor
verifies them. What is verified never changes what a session emits, or its law.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from outrider.spec.tree import DraftTree
from outrider.speculation.cost_table import CostTable
from outrider_verifier.model_runner.results import Settled
from outrider_verifier.model_runner.rows import Draft
from outrider_verifier.state.ngram_index import StandIn
from outrider_verifier.state.session import Session

GAIN: Final = 1.0 / 8.0
"""What a new round of the drafter weighs against all before it."""
MARGIN: Final = 1.1
"""A lookup must be expected to emit so many times what the drafter's rounds do."""
LEAST_REACHED: Final = 0.25
"""Where costs are not known: a token that stands less often is not worth a row."""


class StandIns:
    """Makes them; engine thread only."""

    def __init__(self, costs: CostTable, *, enabled: bool) -> None:
        """`costs`: forwards by the shape of their round."""
        self._costs, self._enabled = costs, enabled

    def follow(self, session: Session) -> None:
        """A session begins, or its plan has changed."""
        able = self._enabled and session.plan.speculative and not session.own_draft
        # Of what a lookup finds a grammar may allow nothing.
        if not able or session.constraint is not None:
            session.stand_in = None
        elif session.stand_in is None:
            session.stand_in = StandIn()

    def better(self, session: Session, room: int) -> Draft | None:
        """A draft of up to `room` nodes for the session's prefix that is expected to emit more than
        its drafter's."""
        stand_in = session.stand_in
        if stand_in is None or not session.outdone:
            return None
        return self._draft(session, stand_in, min(_longest(session), room))

    def missed(self, session: Session, rows: int, room: int) -> Draft | None:
        """A draft for a row that goes without its drafter's, in a round of `rows` rows with room
        for so many nodes; None: none is found, or plain decoding is faster."""
        stand_in = session.stand_in
        if stand_in is None:
            return None
        longest = min(_longest(session), room)
        return self._draft(session, stand_in, self._length(stand_in, rows, longest))

    def observe(self, rows: Iterable[Settled]) -> None:
        """Learn from a round that is settled; while the next one runs, if there can be one."""
        for row in rows:
            session = row.session
            stand_in, verified = session.stand_in, row.verified
            if stand_in is None or session.paused or session.ended:
                continue
            stand_in.lookup.follow(session.tokens, session.length)
            if verified is not None and verified.nodes and not verified.stand_in:
                known = stand_in.drafters
                count = float(len(row.tokens))
                stand_in.drafters = count if known is None else known + GAIN * (count - known)
            stand_in.better = _outdoes(session, stand_in)

    def _draft(self, session: Session, stand_in: StandIn, most: int) -> Draft | None:
        found = stand_in.lookup.draft(session.tokens, session.length, most)
        return None if found is None else Draft(tree=DraftTree.chain(found), law=None)

    def _length(self, stand_in: StandIn, rows: int, longest: int) -> int:
        """How many tokens to verify, for the most tokens per second of the row; 0: none."""
        if longest <= 0:
            return 0
        reached = stand_in.lookup.reached(longest)
        nodes = np.arange(longest + 1, dtype=np.float64)
        # As if every row had as many: who misses a draft seldom misses it alone.
        seconds = self._costs.estimates(rows, nodes * rows)
        if not np.isfinite(seconds).all():
            return int((reached >= LEAST_REACHED).sum())
        emitted = 1.0 + np.concatenate(([0.0], np.cumsum(reached)))
        return int(np.argmax(emitted / seconds))


def _longest(session: Session) -> int:
    """A round emits one token beyond its draft."""
    return min(session.plan.draft_tokens, session.remaining - 1)


def _outdoes(session: Session, stand_in: StandIn) -> bool:
    if stand_in.drafters is None:
        return False
    expected = 1.0 + float(stand_in.lookup.reached(max(0, _longest(session))).sum())
    return expected > MARGIN * stand_in.drafters
