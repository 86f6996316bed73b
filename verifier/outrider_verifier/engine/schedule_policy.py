"""Scheduling policy: picks decode rows and prefill chunks of the next round, or a time to wait.

Pure; times are seconds of one clock.
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
    """The prompt tokens that join a round: by priority, then in order of opening, up to
    `limits.prefill_tokens`, whether or not sessions decode in it.

    Prompts make rounds longer for decoding sessions, but a prompt never waits for those sessions:
    a session whose prompt waits decodes nothing, and all prompts are computed sooner or later.
    """
    if not prefilling:
        return ()
    return _fill(sorted(prefilling, key=_turn), limits.prefill_tokens, limits.chunk_tokens)


def _turn(row: RowState) -> tuple[int, float]:
    """Whose prompt comes first is smaller."""
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
"""Of a session the same row is asked for round after round."""


class _Ready(NamedTuple):
    at: float
    cost: int
    row: DecodeRow
    hit: bool = False
    """Whether its proposal was there before it could be used."""
    priority: int = 0


def plan_drafted(
    session_ids: Sequence[SessionId],
    nodes: Sequence[int],
    limits: RoundLimits,
    prefilling: Sequence[RowState] = (),
) -> RoundPlan | None:
    """The next round if every decoding session has a usable proposal, of so many `nodes`, and none
    must yield to a prompt; so no row is waited for. None if they do not all fit one round: then see
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
    """The next round of sessions that need nothing from outside, with so many nodes of in-process
    drafts together, and of prompts of others like them. None if not all fit one round."""
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
    """Choose the next round.

    A decoding row is ready when it has a proposal, when none is expected, or when its proposal
    timeout is over. Ready rows go oldest first within `decode_tokens`; prompts by priority, then in
    order of opening, within `prefill_tokens`. While other rows still await proposals, a round
    starts only `batch_wait_s`, or `batch_wait_rounds`, after its first row became ready, so that
    proposals of one draft batch share it; or after the last round ended, `idle_since`, if that was
    later: else the sessions of two rounds, each ready while the other runs, would never share one.
    If fewer rows are awaited than are ready, the waiting time is multiplied by awaited / ready.
    `max_rows`: of a half, where sessions take turns (`two_batch_overlap`); nothing is gathered
    beyond half of one. A row whose proposal was there before it could be used, by look-ahead,
    waits only as long as `worthwhile_wait_s` says. Rows of a lower priority than a prompt's yield
    to it, up to `yield_s`, and the prompt does not wait for other rows.
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
    """The ready rows that need not, or have long enough."""
    if not prefilling:
        return ready
    highest = _highest(prefilling)
    return [entry for entry in ready if entry.priority >= highest or now - entry.at >= yield_s]


def _highest(prefilling: list[RowState]) -> float:
    """Of the priorities of prompts; below all others where there are none."""
    return max([row.priority for row in prefilling], default=-math.inf)


def _window_s(
    prefilling: list[RowState],
    ready: list[_Ready],
    awaited: int,
    limits: RoundLimits,
    times: RoundEstimates,
) -> float:
    """How long the first ready row waits for so many."""
    window_s, rounds_s = limits.batch_wait_s, limits.batch_wait_rounds * times.round_s
    # Nobody waits longer for what is known not to come in time,
    if rounds_s > window_s and times.answer_s <= rounds_s:
        highest = _highest(prefilling)
        # or once a row has waited in vain, or gives way to a prompt.
        if not any([entry.row.is_timed_out or entry.priority < highest for entry in ready]):
            window_s = rounds_s
    window_s *= min(1.0, awaited / max(1, len(ready)))
    if any([entry.hit for entry in ready]):
        return min(window_s, worthwhile_wait_s(len(ready), awaited, times))
    return window_s


def worthwhile_wait_s(ready: int, awaited: int, times: RoundEstimates) -> float:
    """Return how long, in seconds from the last round's end, `ready` rows wait for `awaited` ones
    whose drafts had not arrived.

    Starting at once costs the awaited rows the rest of the round, since they join the next one.
    Waiting for their drafts costs the ready rows that time. So waiting pays up to awaited / (ready
    + awaited) of a round, and not at all if the drafts are known to take longer or nothing is known
    of them.
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
    """The round of the other half-batch to submit behind `in_flight`; an empty one: none yet, and
    if its `wait_until` is set, a proposal may still make one before `in_flight` ends."""
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
    """Rows with prompt tokens left, rows that are ready, and the ends of the others' proposal
    timeout."""
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
    """The round to submit before `in_flight` is settled; an empty one: settle first.

    No session may need the host between two of its rounds: no proposal used or expected. Rows that
    the round in flight is sure to finish stay out.
    """
    prefilling: list[RowState] = []
    ready: list[_Ready] = []
    under_way = set(in_flight.session_ids)
    for row in rows:
        if row.nodes is not None or not row.runs_ahead:
            return RoundPlan()
        if row.prefill_left > 0:
            prefilling.append(row)
        # Every round emits a token at least.
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
    """Oldest rows first, within the limits."""
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
