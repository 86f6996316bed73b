"""What rounds gave to sessions; to those that are paused nearly always the same (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from outrider_verifier.model_runner.results import RowResult
from outrider_verifier.planner.workload_stats import RoundMark, RoundTally, WorkloadStats
from outrider_verifier.state.session import Session

MISS_ROUNDS: Final = 4.0
"""Plain rounds that a miss counts as at most when drafts are judged."""


def mark_round_end(sessions: Iterable[Session], mark: RoundMark) -> None:
    """A round of these ended at `mark`, and nothing more is to be seen of it."""
    for session in sessions:
        if session.speculation_state is not None:
            session.speculation_state.last_round = mark


def observe_plain_rows(
    sessions: Sequence[Session], mark: RoundMark, touched: list[RoundTally]
) -> list[Session]:
    """Add what sessions got that have paused for a while, and emitted one token each in a round
    that ended at `mark`: all that had the same last round at once. Returns those of which more is
    to be seen; `touched` gets what is to be judged."""
    others: list[Session] = []
    known: WorkloadStats | None = None
    last: RoundMark | None = None
    count = 0
    for session in sessions:
        speculation_state = session.speculation_state
        if speculation_state is None or speculation_state.is_in_process:
            continue
        if session.link_id is None and not session.is_speculation_off:
            # See `observe_row`.
            speculation_state.last_round = mark
            continue
        before = speculation_state.last_round
        if speculation_state.unsettled_rounds > 0 or session.has_stalled_drafter or before is None:
            others.append(session)
            continue
        if before is not last or speculation_state.workload is not known:
            # Rows that are alike follow each other, nearly always.
            _add(known, last, count, mark, touched)
            known, last, count = speculation_state.workload, before, 0
        count += 1
        speculation_state.last_round = mark
    _add(known, last, count, mark, touched)
    return others


def _add(
    known: WorkloadStats | None,
    last: RoundMark | None,
    count: int,
    mark: RoundMark,
    touched: list[RoundTally],
) -> None:
    """Add so many rows of one kind whose last round was the same; no-op before there are any."""
    if known is None or last is None:
        return
    tally = known.get_tally(True, False, settled=True)
    if not tally.rows:
        touched.append(tally)
    spent_s, alone_s = mark.elapsed_since(last)
    # Each emitted the one token of a plain round.
    tally.add_rows(count, count, count, count * max(0.0, spent_s), count * alone_s)


def observe_row(row: RowResult, mark: RoundMark, touched: list[RoundTally], round_s: float) -> None:
    """Add what a session got to what its kind did; `plain_round_s`: a plain round, 0: not known."""
    session, speculation_state = row.session, row.session.speculation_state
    if speculation_state is None or speculation_state.is_in_process:
        return
    last, speculation_state.last_round = speculation_state.last_round, mark
    if session.link_id is None and not session.is_speculation_off:
        # Without a drafter there was no choice, so nothing is learnt about it.
        return
    known, nodes, hit = speculation_state.workload, row.nodes, row.is_hit
    spent_s, alone_s = (0.0, 0.0) if last is None else mark.elapsed_since(last)
    if hit:
        # Nothing arrived after the root, and yet the drafter follows.
        session.has_stalled_drafter = False
        speculation_state.record_healthy()
    if nodes and not row.used_ngram_fallback:
        key = nodes, row.accepted
        known.accepted_levels[key] = known.accepted_levels.get(key, 0) + 1
    elif session.has_stalled_drafter or row.missed_proposal:
        absent = row.missed_proposal and speculation_state.rounds_without_proposal > 0
        if round_s:
            # One drafter that stops is no reason to leave speculation; misses for ever are.
            spent_s = min(spent_s, MISS_ROUNDS * round_s)
        speculation_state.record_skipped_round(session)
        if absent:
            if mark.ended_at >= speculation_state.proposals_late_since:
                speculation_state.record_round(drafted=False)
            return
    # What was looked up in its own text says nothing of its drafter.
    drafted = nodes > 0 and not row.used_ngram_fallback
    if last is None:
        # Its first round: the drafter had the prompt to read, as it will not again.
        speculation_state.record_round(drafted=drafted, missed=row.missed_proposal)
        return
    tally = known.get_tally(
        session.is_speculation_off,
        session.is_look_ahead_on,
        settled=speculation_state.unsettled_rounds <= 0,
    )
    if not tally.rows:
        touched.append(tally)
    count = len(row.tokens)
    tally.add_rows(1, count, count * count, max(0.0, spent_s), alone_s)
    tally.hits += hit
    tally.missed_rows += not nodes
    speculation_state.record_round(drafted=drafted, missed=row.missed_proposal)
