"""What rounds gave to sessions that have paused speculation: nearly all of them the same (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outrider_verifier.known import Known, Mark, Tally
from outrider_verifier.settled import Settled


def observe_plain(rows: Sequence[Settled], mark: Mark, touched: list[Tally]) -> list[Settled]:
    """Add what sessions got that have paused for a while, all that had the same last round at once;
    returns the other rows. `mark`: the end of this round; `touched` gets what is to be judged."""
    others: list[Settled] = []
    alike: Counter[tuple[Known, Mark]] = Counter()
    for row in rows:
        session, pace = row.session, row.session.pace
        if pace is None:
            continue
        steady = session.paused and pace.unsettled <= 0 and not (session.suspect or row.missed)
        if not steady or pace.mark is None or pace.own or session.link_id is None or row.nodes:
            others.append(row)
            continue
        alike[pace.known, pace.mark] += 1
        pace.mark = mark
    for (known, last), count in alike.items():
        tally = known.tally(True, False, settled=True)
        if not tally.rows:
            touched.append(tally)
        spent_s, alone_s = mark.since(last)
        # Each emitted the one token of a plain round.
        tally.add(count, count, count, count * max(0.0, spent_s), count * alone_s)
    return others
