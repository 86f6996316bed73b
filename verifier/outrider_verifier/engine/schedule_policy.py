"""Scheduling policy: chooses the decode rows and prefill chunks of the next round, or a time to
wait until.

All functions are pure. All times are in seconds on the same clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from outrider.ids import SessionId
from outrider_verifier.state.round_plan import (
    DecodeRow,
    PrefillChunk,
    RoundEstimates,
    RoundLimits,
    RoundPlan,
    RowState,
)


def choose_prompt_chunks(
    prefilling: Sequence[RowState], limits: RoundLimits
) -> tuple[PrefillChunk, ...]:
    """Return the prefill chunks of a round, at most `limits.prefill_tokens` tokens in total.
    Prompts are taken by priority, then in order of opening. Decoding sessions do not affect the
    result.

    Prompts make rounds longer for decoding sessions, but a prompt never waits for those sessions: a
    session whose prompt waits decodes nothing, and all prompts have to be computed sooner or later.
    """
    if not prefilling:
        return ()
    return _fill(sorted(prefilling, key=_turn), limits.prefill_tokens, limits.chunk_tokens)


def _turn(row: RowState) -> tuple[int, float]:
    """Return the sort key of a prompt; prompts with smaller keys are computed first."""
    return -row.priority, row.root_known_at


def _fill(rows: list[RowState], budget: int, piece: int) -> tuple[PrefillChunk, ...]:
    chunks: list[PrefillChunk] = []
    for row in rows:
        if budget <= 0:
            break
        take = min(row.prefill_left, budget)
        chunks.append(PrefillChunk(session_id=row.session_id, num_tokens=take))
        budget -= -(-take // piece) * piece
    return tuple(chunks)


_UNKNOWN = RoundEstimates()
_row_of = lru_cache(maxsize=4096)(DecodeRow)
"""Cached rows, because the scheduler asks for the same row every round."""


class _Ready(NamedTuple):
    at: float
    cost: int
    row: DecodeRow
    hit: bool = False
    """Whether the proposal arrived before its prefix was committed."""
    priority: int = 0


def plan_drafted(
    session_ids: Sequence[SessionId],
    nodes: Sequence[int],
    limits: RoundLimits,
    prefilling: Sequence[RowState] = (),
) -> RoundPlan | None:
    """Return the next round for the case that every decoding session has a usable proposal and none
    must yield to a prompt, so that the round need not wait. `nodes` is the number of nodes of each
    session's proposal. Return None if the sessions do not all fit into one round; then use
    `plan_round`."""
    if not session_ids or len(session_ids) + sum(nodes) > limits.decode_tokens:
        return None
    return RoundPlan(
        prefill=choose_prompt_chunks(prefilling, limits),
        decode=tuple([_row_of(name, True) for name in session_ids]),
    )


def plan_self_contained(
    session_ids: Sequence[SessionId],
    limits: RoundLimits,
    prefilling: Sequence[RowState] = (),
    *,
    in_process_nodes: int = 0,
) -> RoundPlan | None:
    """Return the next round of sessions that need no proposals and no work of the host between
    rounds. `session_ids` are the sessions that decode, `prefilling` those that still have prompt
    tokens. `in_process_nodes` is the total number of nodes of their in-process drafts. Return None
    if not all sessions fit into one round."""
    if len(session_ids) + in_process_nodes > limits.decode_tokens:
        return None
    return RoundPlan(
        prefill=choose_prompt_chunks(prefilling, limits),
        decode=tuple(map(_row_of, session_ids)),
        is_self_contained=True,
    )


_at = attrgetter("at")


def plan_round(
    rows: Iterable[RowState],
    now: float,
    limits: RoundLimits,
    *,
    idle_since: float = 0.0,
    max_rows: int | None = None,
    times: RoundEstimates = _UNKNOWN,
) -> RoundPlan:
    """Return the next round, or an empty plan with the time to wait until.

    A decoding row is ready when it has a proposal, when none is expected, or when its proposal
    timeout is over. Ready rows are taken oldest first, up to `limits.decode_tokens`. Prompts are
    taken by priority, then in order of opening, up to `limits.prefill_tokens`.

    While other rows await proposals, the round does not start immediately: it waits from the time
    when its first row became ready, or when the last round ended (`idle_since`), whichever is
    later. The waiting time is `limits.batch_wait_s`, or that of `limits.batch_wait_rounds` rounds
    if the proposals are expected within it. So proposals of one draft batch share a round, and
    sessions that become ready during each other's rounds are merged into one round. If fewer rows
    are awaited than are ready, the waiting time is multiplied by awaited / ready. If the proposal
    of any ready row arrived early, by look-ahead, the round waits no longer than
    `worthwhile_wait_s` returns.

    `max_rows` is the maximum number of rows of a half-batch if sessions run in two alternating
    half-batches (see `TwoBatchOverlap`), else None. If it is set, the round starts as soon as half
    of this number of rows is ready. Ready rows with a lower priority than a prompt are left out of
    the round, for at most `limits.yield_s` after they became ready. The prompt's round then starts
    immediately.
    """
    prefilling, ready, deadlines = _sorted_out(rows, now)
    if not ready and not prefilling:
        return RoundPlan(wait_until=min(deadlines, default=None))
    urgent = _not_deferred(prefilling, ready, now, limits.yield_s)
    if len(urgent) < len(ready):
        return _round(prefilling, urgent, limits, max_rows)
    if deadlines and not _fill_a_half(ready, max_rows):
        first = min([entry.at for entry in ready] + [row.root_known_at for row in prefilling])
        first = max(first, idle_since)
        gathered = first + _window_s(prefilling, ready, len(deadlines), limits, times)
        if now < gathered:
            return RoundPlan(wait_until=min(gathered, *deadlines))
    return _round(prefilling, ready, limits, max_rows)


def _not_deferred(
    prefilling: list[RowState], ready: list[_Ready], now: float, yield_s: float
) -> list[_Ready]:
    """Return the ready rows that need not yield to a prompt, or that have yielded for `yield_s`."""
    if not prefilling:
        return ready
    highest = _highest(prefilling)
    return [entry for entry in ready if entry.priority >= highest or now - entry.at >= yield_s]


def _highest(prefilling: list[RowState]) -> float:
    """Return the highest priority of the prompts; -inf if there are none."""
    return max([row.priority for row in prefilling], default=-math.inf)


def _window_s(
    prefilling: list[RowState],
    ready: list[_Ready],
    awaited: int,
    limits: RoundLimits,
    times: RoundEstimates,
) -> float:
    """Return how long, in seconds, the first ready row waits for `awaited` other rows."""
    window_s, rounds_s = limits.batch_wait_s, limits.batch_wait_rounds * times.round_s
    # The longer window applies only if proposals are expected within it,
    if rounds_s > window_s and times.answer_s <= rounds_s:
        highest = _highest(prefilling)
        # and if no row has timed out or yields to a prompt.
        if not any([entry.row.is_timed_out or entry.priority < highest for entry in ready]):
            window_s = rounds_s
    window_s *= min(1.0, awaited / max(1, len(ready)))
    if any([entry.hit for entry in ready]):
        return min(window_s, worthwhile_wait_s(len(ready), awaited, times))
    return window_s


def worthwhile_wait_s(ready: int, awaited: int, times: RoundEstimates) -> float:
    """Return how long, in seconds after the end of the last round, `ready` rows should wait for
    `awaited` other rows whose drafts have not arrived yet.

    If the round starts immediately, the awaited rows lose the rest of the round, because they join
    the next one. If it waits for their drafts, the ready rows lose the waiting time. So waiting is
    worthwhile for at most awaited / (ready + awaited) of a round. The result is 0 if the drafts are
    expected later than that, or if no time is known for them.
    """
    max_s = times.round_s * awaited / (ready + awaited)
    return max_s if 0.0 < times.answer_s <= max_s else 0.0


def plan_other_half(
    rows: Iterable[RowState],
    now: float,
    in_flight: RoundPlan,
    limits: RoundLimits,
    *,
    max_rows: int,
) -> RoundPlan:
    """Return the round of the other half-batch, to submit after `in_flight`. The plan is empty if
    too few rows are ready. An empty plan whose `wait_until` is set means that further proposals may
    still arrive before `in_flight` ends."""
    under_way = set(in_flight.session_ids)
    others = (row for row in rows if row.prefill_left > 0 or row.session_id not in under_way)
    prefilling, ready, deadlines = _sorted_out(others, now)
    if _fill_a_half(ready, max_rows):
        return _round(prefilling, ready, limits, max_rows)
    return RoundPlan(wait_until=min(deadlines, default=None))


def _fill_a_half(ready: list[_Ready], max_rows: int | None) -> bool:
    return max_rows is not None and 2 * len(ready) >= max_rows


def _sorted_out(
    rows: Iterable[RowState], now: float
) -> tuple[list[RowState], list[_Ready], list[float]]:
    """Sort the rows into rows with prompt tokens left, ready rows, and the proposal deadlines of
    all other rows."""
    prefilling: list[RowState] = []
    ready: list[_Ready] = []
    deadlines: list[float] = []
    for row in rows:
        if row.prefill_left > 0:
            prefilling.append(row)
        elif row.nodes is not None:
            at = row.root_known_at if row.root_known_at > row.proposal_at else row.proposal_at
            hit = row.proposal_at < row.root_known_at
            decode = DecodeRow(row.session_id, True)
            ready.append(_Ready(at, 1 + row.nodes, decode, hit, row.priority))
        elif not row.awaits_proposal:
            own = DecodeRow(session_id=row.session_id)
            ready.append(
                _Ready(row.root_known_at, 1 + row.in_process_nodes, own, priority=row.priority)
            )
        elif now >= row.root_known_at + row.proposal_timeout_s:
            missed = DecodeRow(session_id=row.session_id, is_timed_out=True)
            at = row.root_known_at + row.proposal_timeout_s
            ready.append(_Ready(at, 1, missed, priority=row.priority))
        else:
            deadlines.append(row.root_known_at + row.proposal_timeout_s)
    return prefilling, ready, deadlines


def plan_next_in_flight(
    rows: Iterable[RowState], in_flight: RoundPlan, limits: RoundLimits
) -> RoundPlan:
    """Return the round to submit before `in_flight` is finished, or an empty plan if `in_flight`
    must be finished first.

    This is possible only if no session has a proposal and all rows are marked with `runs_ahead`:
    their sessions need no work of the host between two rounds. Sessions that may end with
    `in_flight` are left out.
    """
    prefilling: list[RowState] = []
    ready: list[_Ready] = []
    under_way = set(in_flight.session_ids)
    for row in rows:
        if row.nodes is not None or not row.runs_ahead:
            return RoundPlan()
        if row.prefill_left > 0:
            prefilling.append(row)
        # Every round emits at least one token.
        elif row.tokens_left > 1 or row.session_id not in under_way:
            own = DecodeRow(session_id=row.session_id)
            ready.append(_Ready(row.root_known_at, 1 + row.in_process_nodes, own))
    return _round(prefilling, ready, limits)


def _round(
    prefilling: list[RowState],
    ready: list[_Ready],
    limits: RoundLimits,
    max_rows: int | None = None,
) -> RoundPlan:
    """Return the plan of the oldest ready rows and the prompts that fit the limits."""
    ready = sorted(ready, key=_at)[:max_rows]
    return RoundPlan(
        prefill=choose_prompt_chunks(prefilling, limits),
        decode=_fit(ready, limits.decode_tokens),
    )


def _fit(ready: list[_Ready], budget: int) -> tuple[DecodeRow, ...]:
    if sum([entry.cost for entry in ready]) <= budget:
        return tuple([entry.row for entry in ready])
    taken: list[DecodeRow] = []
    for entry in ready:
        if taken and entry.cost > budget:
            break
        taken.append(entry.row)
        budget -= entry.cost
    return tuple(taken)
