"""What rounds gave to sessions that have paused speculation: nearly all of them the same (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_verifier.known import Known, Mark, Tally
from outrider_verifier.settled import Settled


def observe_plain(
    rows: Sequence[Settled], mark: Mark, touched: list[Tally], *, drafts: bool
) -> list[Settled]:
    """Add what sessions got that have paused for a while, all that had the same last round at once;
    returns the other rows. `mark`: the end of this round; `touched` gets what is to be judged;
    `drafts`: whether any row verified some."""
    others: list[Settled] = []
    known: Known | None = None
    last: Mark | None = None
    count = 0
    for row in rows:
        session = row.session
        pace = session.pace
        if pace is None:
            continue
        steady = session.paused and pace.unsettled <= 0 and not (session.suspect or row.missed)
        before = pace.mark
        if not steady or before is None or pace.own or (drafts and row.nodes):
            others.append(row)
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
