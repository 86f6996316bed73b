"""What rounds gave to sessions that have paused speculation: nearly all of them the same (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_verifier.known import Known, Mark, Tally
from outrider_verifier.sessions import Session


def observe_plain(sessions: Sequence[Session], mark: Mark, touched: list[Tally]) -> list[Session]:
    """Add what sessions got that have paused for a while, and emitted one token each in a round
    that ended at `mark`: all that had the same last round at once. Returns those of which more is
    to be seen; `touched` gets what is to be judged."""
    others: list[Session] = []
    known: Known | None = None
    last: Mark | None = None
    count = 0
    for session in sessions:
        pace = session.pace
        if pace is None or pace.own:
            continue
        before = pace.mark
        if pace.unsettled > 0 or session.suspect or before is None:
            others.append(session)
            continue
        if before is not last or pace.known is not known:
            # Rows that are alike follow each other, nearly always.
            _add(known, last, count, mark, touched)
            known, last, count = pace.known, before, 0
        count += 1
        pace.mark = mark
    _add(known, last, count, mark, touched)
    return others


def _add(
    known: Known | None, last: Mark | None, count: int, mark: Mark, touched: list[Tally]
) -> None:
    """Add so many rows of one kind whose last round was the same; no-op before there are any."""
    if known is None or last is None:
        return
    tally = known.tally(True, False, settled=True)
    if not tally.rows:
        touched.append(tally)
    spent_s, alone_s = mark.since(last)
    # Each emitted the one token of a plain round.
    tally.add(count, count, count, count * max(0.0, spent_s), count * alone_s)
