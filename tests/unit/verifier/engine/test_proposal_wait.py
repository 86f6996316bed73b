"""How long a round waits for rows that still await their proposals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider_verifier.engine.schedule_policy import plan_round
from outrider_verifier.state.round_plan import RoundEstimates, RoundLimits, RowState

from outrider.ids import SessionId

LIMITS = RoundLimits(prefill_tokens=64, decode_tokens=1000, batch_wait_s=0.004)
BY_ROUNDS = replace(LIMITS, batch_wait_rounds=2.0)
"""Of a target on CPUs."""


def rows(ready: int, awaited: int) -> list[RowState]:
    return [
        RowState(
            session_id=SessionId(f"s{number}"),
            prefill_left=0,
            nodes=4 if number < ready else None,
            awaits_proposal=number >= ready,
            root_known_at=1.0,
            proposal_at=1.0,
            proposal_timeout_s=1.0,
        )
        for number in range(ready + awaited)
    ]


def assert_gathers(
    ready: int, awaited: int, gathered: float, limits: RoundLimits, times: RoundEstimates
) -> None:
    """That the ready rows wait for the others so long and then go."""
    waiting = plan_round(rows(ready, awaited), 1.0 + 0.9 * gathered, limits, times=times)
    assert waiting.is_empty
    assert waiting.wait_until == pytest.approx(1.0 + gathered)
    begun = plan_round(rows(ready, awaited), 1.0 + 1.1 * gathered, limits, times=times)
    assert len(begun.decode) == ready


@pytest.mark.parametrize(
    ("ready", "awaited", "gathered"), [(1, 1, 0.004), (1, 7, 0.004), (4, 2, 0.002), (8, 1, 0.0005)]
)
def test_many_wait_for_few_only_shortly(ready: int, awaited: int, gathered: float) -> None:
    assert_gathers(ready, awaited, gathered, LIMITS, RoundEstimates())


@pytest.mark.parametrize(
    ("ready", "awaited", "round_s", "gathered"),
    [(1, 1, 0.05, 0.1), (4, 2, 0.05, 0.05), (1, 1, 0.0, 0.004), (1, 1, 0.001, 0.004)],
)
def test_where_the_drafter_takes_the_same_cores_it_is_waited_for_by_the_round(
    ready: int, awaited: int, round_s: float, gathered: float
) -> None:
    # Beside a round it takes as long as that.
    times = RoundEstimates(answer_s=1.5 * round_s, round_s=round_s)
    assert_gathers(ready, awaited, gathered, BY_ROUNDS, times)


def test_what_is_known_to_take_longer_is_not_waited_for_by_the_round() -> None:
    times = RoundEstimates(answer_s=0.11, round_s=0.05)
    plan = plan_round(rows(2, 2), 1.0 + 1.1 * LIMITS.batch_wait_s, BY_ROUNDS, times=times)
    assert len(plan.decode) == 2


def test_who_has_waited_in_vain_does_not_wait_by_the_round() -> None:
    made = [row._replace(root_known_at=1.1) for row in rows(0, 2)]
    made[0] = made[0]._replace(root_known_at=0.0)
    times = RoundEstimates(answer_s=0.01, round_s=0.05)
    plan = plan_round(made, 1.0 + 1.1 * LIMITS.batch_wait_s, BY_ROUNDS, times=times)
    assert [row.is_timed_out for row in plan.decode] == [True]


def test_a_prompt_of_a_higher_priority_does_not_wait_by_the_round_with_others() -> None:
    prompt = RowState(
        session_id=SessionId("p"), prefill_left=9, nodes=None, root_known_at=1.06, priority=5
    )
    times = RoundEstimates(answer_s=0.01, round_s=0.05)
    # The ready row has given way for as long as it does.
    plan = plan_round([*rows(1, 1), prompt], 1.065, BY_ROUNDS, times=times)
    assert len(plan.prefill) == len(plan.decode) == 1


def mixed(hits: int, awaited: int, *, proposal_timeout_s: float = 1.0) -> list[RowState]:
    """Rows whose drafts were there before their roots, and rows that still wait for theirs."""
    made = rows(hits, awaited)
    return [
        row._replace(proposal_at=0.5, proposal_timeout_s=proposal_timeout_s)
        if row.nodes is not None
        else row
        for row in made
    ]


@pytest.mark.parametrize(
    ("hits", "awaited", "answer_s", "goes_at_once"),
    [
        # One hit, one miss, rounds of 5 ms: waiting 1 ms costs less than 4 ms for the other.
        (1, 1, 0.001, False),
        # Seven hits would wait 1 ms each so that one row gains 4.
        (7, 1, 0.001, True),
        (1, 7, 0.004, False),
        # The answer takes as long as the round.
        (1, 1, 0.005, True),
        # Nothing is known of it.
        (1, 1, 0.0, True),
    ],
)
def test_hits_wait_for_others_only_where_that_pays(
    hits: int, awaited: int, answer_s: float, goes_at_once: bool
) -> None:
    times = RoundEstimates(answer_s=answer_s, round_s=0.005)
    plan = plan_round(mixed(hits, awaited), 1.0, LIMITS, idle_since=1.0, times=times)
    assert len(plan.decode) == (hits if goes_at_once else 0)
    if not goes_at_once:
        assert plan.wait_until is not None and plan.wait_until >= 1.0 + answer_s
        assert plan.wait_until <= 1.0 + LIMITS.batch_wait_s
        gone = plan_round(
            mixed(hits, awaited), plan.wait_until, LIMITS, idle_since=1.0, times=times
        )
        assert len(gone.decode) == hits


def test_a_row_that_missed_is_held_up_by_nobody() -> None:
    times = RoundEstimates(answer_s=0.001, round_s=0.005)
    late = mixed(3, 1)[3]._replace(proposal_timeout_s=0.0)
    plan = plan_round([*mixed(3, 0), late], 1.0, LIMITS, idle_since=1.0, times=times)
    assert len(plan.decode) == 4
    assert [row.is_timed_out for row in plan.decode] == [False, False, False, True]


def test_rows_with_fresh_drafts_gather_as_ever() -> None:
    times = RoundEstimates(answer_s=0.0, round_s=0.005)
    plan = plan_round(rows(1, 1), 1.0, LIMITS, times=times)
    assert plan.wait_until == pytest.approx(1.004)
