"""The schedule decides in microseconds, with a fake clock and no sockets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.engine.schedule_policy import (
    plan_drafted,
    plan_next_in_flight,
    plan_round,
    plan_self_contained,
)
from outrider_verifier.state.round_plan import (
    DecodeRow,
    PrefillChunk,
    RoundLimits,
    RoundPlan,
    RowState,
)

from outrider.ids import SessionId

LIMITS = RoundLimits(prefill_tokens=16, decode_tokens=12, batch_wait_s=0.001)


def row(name: str, **changes: Any) -> RowState:
    """A plain decoding row whose root is known since 0."""
    fields: dict[str, Any] = {
        "session_id": SessionId(name),
        "prefill_left": 0,
        "nodes": None,
        "awaits_proposal": False,
        "root_known_at": 0.0,
        "proposal_timeout_s": 1.0,
    }
    return RowState(**(fields | changes))


def waiting(name: str, **changes: Any) -> RowState:
    """A row that awaits its proposal."""
    return row(name, awaits_proposal=True, **changes)


def decoded(plan: RoundPlan) -> list[str]:
    """Ids of the decoding rows."""
    return [str(r.session_id) for r in plan.decode]


def test_nothing_to_do_waits_for_a_command() -> None:
    plan = plan_round([], 5.0, LIMITS)
    assert plan.is_empty
    assert plan.wait_until is None


def test_a_plain_row_goes_at_once() -> None:
    assert decoded(plan_round([row("a")], 0.0, LIMITS)) == ["a"]


def test_a_waiting_row_waits_until_its_patience_ends() -> None:
    plan = plan_round([waiting("a", root_known_at=2.0)], 2.5, LIMITS)
    assert plan.is_empty
    assert plan.wait_until == 3.0


def test_a_row_whose_patience_is_over_goes_without_a_proposal() -> None:
    plan = plan_round([waiting("a", root_known_at=2.0)], 3.0, LIMITS)
    assert decoded(plan) == ["a"]
    assert plan.decode[0].is_timed_out


def test_a_proposal_makes_a_waiting_row_ready() -> None:
    plan = plan_round([waiting("a", nodes=4, proposal_at=0.2)], 0.2, LIMITS)
    assert decoded(plan) == ["a"]
    assert not plan.decode[0].is_timed_out


def test_a_ready_row_gathers_with_those_that_still_wait() -> None:
    rows = [waiting("a", nodes=4, proposal_at=0.5), waiting("b")]
    assert plan_round(rows, 0.5, LIMITS).wait_until == 0.501
    assert decoded(plan_round(rows, 0.501, LIMITS)) == ["a"]


def test_one_rows_miss_never_stalls_another_for_longer_than_the_gather_window() -> None:
    rows = [waiting("late", proposal_timeout_s=60.0), row("plain", root_known_at=0.0)]
    assert decoded(plan_round(rows, 0.0011, LIMITS)) == ["plain"]


def test_rows_that_became_ready_during_the_last_round_do_not_gather() -> None:
    rows = [waiting("a", nodes=4, proposal_at=0.5), waiting("b", root_known_at=0.8)]
    assert decoded(plan_round(rows, 0.8, LIMITS)) == ["a"]


def test_gathering_ends_early_when_a_patience_does() -> None:
    rows = [waiting("a", nodes=4, proposal_at=0.9998), waiting("b", proposal_timeout_s=1.0)]
    assert plan_round(rows, 0.9999, LIMITS).wait_until == 1.0
    assert sorted(decoded(plan_round(rows, 1.0, LIMITS))) == ["a", "b"]


def test_the_oldest_rows_go_first_within_the_budget() -> None:
    rows = [
        waiting("young", nodes=5, root_known_at=3.0),
        waiting("old", nodes=5, root_known_at=1.0),
        waiting("middle", nodes=5, root_known_at=2.0),
    ]
    assert decoded(plan_round(rows, 9.0, LIMITS)) == ["old", "middle"]


def test_where_all_have_drafts_and_fit_there_is_nothing_to_weigh() -> None:
    rows = [waiting("a", nodes=3, root_known_at=3.0), waiting("b", nodes=0), waiting("c", nodes=4)]
    names, nodes = [r.session_id for r in rows], [r.nodes or 0 for r in rows]
    plan = plan_drafted(names, nodes, LIMITS)
    assert plan is not None and all(r.has_proposal and not r.is_timed_out for r in plan.decode)
    expected = plan_round(rows, 9.0, LIMITS)
    assert sorted(plan.decode) == sorted(expected.decode)
    assert plan.prefill == expected.prefill == ()
    assert plan_drafted(names, [3, 0, 7], LIMITS) is None
    assert plan_drafted([], [], LIMITS) is None
    prompts = [
        row("p", prefill_left=10, root_known_at=2.0),
        row("q", prefill_left=10, root_known_at=1.0),
    ]
    plan = plan_drafted(names, nodes, LIMITS, prompts)
    expected = plan_round(rows + prompts, 9.0, LIMITS)
    assert plan is not None and len(plan.prefill) == 2
    assert plan.prefill == expected.prefill
    assert sorted(plan.decode) == sorted(expected.decode)


def test_one_row_always_fits() -> None:
    plan = plan_round([waiting("a", nodes=99)], 1.0, LIMITS)
    assert decoded(plan) == ["a"]


def test_prompts_share_the_prefill_budget_in_order_of_opening() -> None:
    rows = [
        row("c", prefill_left=9, root_known_at=0.3),
        row("a", prefill_left=10, root_known_at=0.1),
        row("b", prefill_left=10, root_known_at=0.2),
    ]
    plan = plan_round(rows, 1.0, LIMITS)
    assert [(c.session_id, c.num_tokens) for c in plan.prefill] == [("a", 10), ("b", 6)]


def test_prompts_and_decoding_rows_share_a_round() -> None:
    plan = plan_round([row("p", prefill_left=3), row("d")], 0.0, LIMITS)
    assert decoded(plan) == ["d"]
    assert len(plan.prefill) == 1


@st.composite
def row_states(draw: st.DrawFn) -> RowState:
    since = draw(st.floats(0.0, 10.0))
    return row(
        f"s{draw(st.integers(0, 10**9))}",
        prefill_left=draw(st.sampled_from([0, 0, 0, 1, 40])),
        nodes=draw(st.sampled_from([None, None, 0, 3, 30])),
        awaits_proposal=draw(st.booleans()),
        root_known_at=since,
        proposal_at=since + draw(st.floats(0.0, 1.0)),
        proposal_timeout_s=draw(st.floats(0.0, 2.0)),
    )


@given(st.lists(row_states(), max_size=12, unique_by=lambda r: r.session_id), st.floats(0.0, 14.0))
def test_a_plan_always_makes_progress_and_keeps_its_bounds(
    rows: list[RowState], now: float
) -> None:
    plan = plan_round(rows, now, LIMITS)
    if plan.is_empty:
        if rows:
            assert plan.wait_until is not None
            # Looking again at that time finds work, or another time: never none at all.
            again = plan_round(rows, plan.wait_until, LIMITS)
            assert not again.is_empty or (again.wait_until or 0.0) > plan.wait_until
        return
    by_id = {r.session_id: r for r in rows}
    assert sum(c.num_tokens for c in plan.prefill) <= LIMITS.prefill_tokens
    cost = sum(1 + (by_id[r.session_id].nodes or 0) for r in plan.decode)
    assert cost <= LIMITS.decode_tokens or len(plan.decode) == 1
    for chosen in plan.decode:
        state = by_id[chosen.session_id]
        if state.nodes is None and state.awaits_proposal and state.prefill_left == 0:
            assert chosen.is_timed_out
            assert now >= state.root_known_at + state.proposal_timeout_s


def test_own_drafts_count_against_the_rows_of_a_round() -> None:
    rows = [row(name, in_process_nodes=3) for name in "abcd"]
    assert decoded(plan_round(rows, 0.0, LIMITS)) == ["a", "b", "c"]


def ready(name: str, **changes: Any) -> RowState:
    """A decoding row that needs nothing from outside."""
    return row(name, **({"runs_ahead": True, "tokens_left": 9} | changes))


def flight(*names: str) -> RoundPlan:
    """A round of these rows."""
    return RoundPlan(decode=tuple(DecodeRow(session_id=SessionId(name)) for name in names))


def prompt(name: str, left: int, **changes: Any) -> RowState:
    """A prompt of a session that needs nothing from outside."""
    return row(name, prefill_left=left, runs_ahead=True, tokens_left=9, **changes)


def chunks(plan: RoundPlan) -> list[tuple[str, int]]:
    """Sessions and prompt tokens of a round."""
    return [(chunk.session_id, chunk.num_tokens) for chunk in plan.prefill]


def test_the_rows_of_a_round_in_flight_go_ahead_oldest_first() -> None:
    rows = [ready("a", root_known_at=2.0), ready("b", root_known_at=1.0)]
    assert decoded(plan_next_in_flight(rows, flight("b", "a"), LIMITS)) == ["b", "a"]


@pytest.mark.parametrize("changes", [{"runs_ahead": False}, {"nodes": 0}, {"nodes": 4}])
def test_one_row_that_needs_the_host_holds_the_next_round_back(changes: dict[str, Any]) -> None:
    held = row("b", **({"runs_ahead": True, "tokens_left": 9} | changes))
    assert plan_next_in_flight([ready("a"), held], flight("a", "b"), LIMITS).is_empty


def test_sessions_beside_the_round_in_flight_join_the_next_one() -> None:
    rows = [ready("a"), ready("b", tokens_left=1), prompt("c", 3)]
    plan = plan_next_in_flight(rows, flight("a"), LIMITS)
    assert decoded(plan) == ["a", "b"]
    assert chunks(plan) == [("c", 3)]


def test_a_session_goes_on_behind_its_prompt_in_flight() -> None:
    chunk = PrefillChunk(session_id=SessionId("b"), num_tokens=4)
    in_flight = RoundPlan(prefill=(chunk,), decode=flight("a").decode)
    assert decoded(plan_next_in_flight([ready("a"), ready("b")], in_flight, LIMITS)) == ["a", "b"]
    # The prompt's own token may be the only one that is wanted.
    assert decoded(
        plan_next_in_flight([ready("a"), ready("b", tokens_left=1)], in_flight, LIMITS)
    ) == ["a"]
    assert chunks(plan_next_in_flight([prompt("b", 2)], in_flight, LIMITS)) == [("b", 2)]


def test_rows_that_were_closed_or_are_sure_to_end_stay_out() -> None:
    last = row("b", runs_ahead=True, tokens_left=1)
    assert decoded(plan_next_in_flight([ready("a"), last], flight("a", "b", "gone"), LIMITS)) == [
        "a"
    ]
    assert plan_next_in_flight([last], flight("b"), LIMITS).is_empty
    assert plan_next_in_flight([], flight("gone"), LIMITS).is_empty


def test_as_many_prompt_tokens_join_rows_that_decode_as_go_alone() -> None:
    limits = replace(LIMITS, prefill_tokens=12)
    prompts = [prompt("p", 9, root_known_at=1.0), prompt("q", 9, root_known_at=2.0)]
    shares = [("p", 9), ("q", 3)]
    assert chunks(plan_round(prompts, 9.0, limits)) == shares
    beside = plan_round([*prompts, ready("a"), ready("b")], 9.0, limits)
    assert chunks(beside) == shares and set(decoded(beside)) == {"a", "b"}


def test_what_a_prompt_leaves_of_a_piece_free_counts_as_taken() -> None:
    limits = replace(LIMITS, prefill_tokens=12, chunk_tokens=4)
    rows = [
        prompt("p", 5, root_known_at=1.0),
        prompt("q", 3, root_known_at=2.0),
        prompt("r", 1, root_known_at=3.0),
    ]
    assert chunks(plan_round(rows, 9.0, limits)) == [("p", 5), ("q", 3)]


def test_rows_that_were_ready_during_a_round_wait_for_those_that_it_held() -> None:
    early = row("a", nodes=3, proposal_at=1.0)
    late = waiting("b", root_known_at=2.0)
    plan = plan_round([early, late], 2.0, LIMITS, idle_since=2.0)
    assert plan.is_empty
    assert plan.wait_until == 2.0 + LIMITS.batch_wait_s
    assert decoded(
        plan_round([early, late], 2.0 + LIMITS.batch_wait_s, LIMITS, idle_since=2.0)
    ) == ["a"]


def test_rows_give_way_to_a_prompt_of_a_higher_priority_but_not_for_long() -> None:
    prompt = row("p", prefill_left=8, priority=1, root_known_at=9.9)
    rows = [
        row("a", root_known_at=9.98),
        row("b", root_known_at=9.97, priority=1),
        row("c", root_known_at=9.94),
        prompt,
    ]
    plan = plan_round(rows, 10.0, LIMITS)
    assert [str(chunk.session_id) for chunk in plan.prefill] == ["p"]
    assert decoded(plan) == ["c", "b"]


def test_a_prompt_of_a_higher_priority_waits_for_no_proposal() -> None:
    rows = [waiting("a", nodes=4, proposal_at=0.9995), waiting("c", root_known_at=0.9)]
    late = row("p", prefill_left=8, root_known_at=0.9999)
    slow = replace(LIMITS, batch_wait_s=0.1, yield_s=2.0)
    plan = plan_round([*rows, late._replace(priority=1)], 0.9999, slow)
    assert plan.prefill and not plan.decode
    assert plan_round([*rows, late], 0.9999, slow).is_empty


def test_rows_do_not_give_way_to_prompts_of_their_own_priority() -> None:
    rows = [
        row("a", root_known_at=9.99, priority=1),
        row("p", prefill_left=8, priority=1, root_known_at=9.9),
    ]
    assert decoded(plan_round(rows, 10.0, LIMITS)) == ["a"]


@given(
    st.lists(st.sampled_from([0, 0, 1, 3]), max_size=14),
    st.sets(st.integers(0, 13)),
    st.lists(st.integers(1, 9), max_size=6),
)
def test_sessions_that_need_nothing_from_outside_are_planned_as_by_their_rows(
    own: list[int], under_way: set[int], left: list[int]
) -> None:
    limits = replace(LIMITS, prefill_tokens=12, chunk_tokens=2)
    names = [SessionId(str(number)) for number in range(len(own))]
    rows = [
        row(name, runs_ahead=True, in_process_nodes=nodes)
        for name, nodes in zip(names, own, strict=True)
    ]
    prompts = [
        row(f"p{place}", prefill_left=tokens, root_known_at=float(-place), runs_ahead=True)
        for place, tokens in enumerate(left)
    ]
    plan = plan_self_contained(names, limits, prompts, in_process_nodes=sum(own))
    if len(own) + sum(own) > limits.decode_tokens:
        assert plan is None
        return
    by_rows = plan_next_in_flight([*rows, *prompts], flight(*map(str, under_way)), limits)
    assert plan is not None and plan.is_self_contained
    assert (plan.decode, plan.prefill) == (by_rows.decode, by_rows.prefill)
