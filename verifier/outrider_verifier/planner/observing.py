"""What rounds gave to sessions; to those that are paused nearly always the same (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from outrider_verifier.model_runner.results import Settled
from outrider_verifier.planner.workload_stats import Known, Mark, Tally
from outrider_verifier.state.session import Session

MISS_ROUNDS: Final = 4.0
"""Plain rounds that a miss counts as at most when drafts are judged."""


def note_end(sessions: Iterable[Session], mark: Mark) -> None:
    """A round of these ended at `mark`, and nothing more is to be seen of it."""
    for session in sessions:
        if session.pace is not None:
            session.pace.mark = mark


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
        if session.link_id is None and not session.paused:
            # See `observe_row`.
            pace.mark = mark
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


def observe_row(row: Settled, mark: Mark, touched: list[Tally], round_s: float) -> None:
    """Add what a session got to what its kind did; `round_s`: a plain round, 0: not known."""
    session, pace = row.session, row.session.pace
    if pace is None or pace.own:
        return
    last, pace.mark = pace.mark, mark
    if session.link_id is None and not session.paused:
        # Without a drafter there was no choice, so nothing is learnt about it.
        return
    known, nodes, hit = pace.known, row.nodes, row.hit
    spent_s, alone_s = (0.0, 0.0) if last is None else mark.since(last)
    if hit:
        # Nothing arrived after the root, and yet the drafter follows.
        session.suspect = False
        pace.well()
    if nodes and not row.stood_in:
        key = nodes, row.accepted
        known.judged[key] = known.judged.get(key, 0) + 1
    elif session.suspect or row.missed:
        absent = row.missed and pace.unheard > 0
        if round_s:
            # One drafter that stops is no reason to leave speculation; misses for ever are.
            spent_s = min(spent_s, MISS_ROUNDS * round_s)
        pace.went_by(session)
        if absent:
            if mark.at >= pace.late_at:
                pace.settle(drafted=False)
            return
    # What was looked up in its own text says nothing of its drafter.
    drafted = nodes > 0 and not row.stood_in
    if last is None:
        # Its first round: the drafter had the prompt to read, as it will not again.
        pace.settle(drafted=drafted, missed=row.missed)
        return
    tally = known.tally(session.paused, session.ahead, settled=pace.unsettled <= 0)
    if not tally.rows:
        touched.append(tally)
    count = len(row.tokens)
    tally.add(1, count, count * count, max(0.0, spent_s), alone_s)
    tally.hits += hit
    tally.missed += not nodes
    pace.settle(drafted=drafted, missed=row.missed)
