"""Admission decides by plain facts and a number for the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_router.admission.policy import (
    MAX_EXCESS_SESSIONS,
    AdmissionRequest,
    AdmissionState,
    AdmitRequest,
    AssignedLoad,
    ExpireRequest,
    RefuseRequest,
    VerifierLoad,
    next_change_at,
    plan_admission,
)

from outrider.ids import RequestId, TenantId, VerifierId
from tests.unit.router.helpers import ticket

A, B = VerifierId("a"), VerifierId("b")


def load(
    name: VerifierId = A, *, tokens: int = 0, sessions: int = 1, **more: object
) -> VerifierLoad:
    """A verifier with sessions of priority 0 that are expected to hold `tokens`."""
    values: dict[str, object] = {"total_tokens": 100, "max_sessions": 8}
    values |= {"assigned_by_priority": {0: AssignedLoad(sessions, tokens)} if tokens else {}} | more
    return VerifierLoad(verifier_id=name, **values)  # type: ignore[arg-type]


def state(
    admission_requests: list[AdmissionRequest], *loads: VerifierLoad, **more: object
) -> AdmissionState:
    return AdmissionState(queue=tuple(admission_requests), verifiers=loads or (load(),), **more)  # type: ignore[arg-type]


def admitted(found: list[AdmitRequest | ExpireRequest | RefuseRequest]) -> list[str]:
    return [action.request_id for action in found if isinstance(action, AdmitRequest)]


def test_requests_are_admitted_in_order_of_arrival_until_the_budget_is_given_away() -> None:
    actions = plan_admission(state([ticket(2, 60), ticket(1, 40), ticket(3, 1)]), 0.0)
    assert actions == [AdmitRequest(RequestId("r1"), A), AdmitRequest(RequestId("r2"), A)]


def test_what_counts_is_what_a_session_is_expected_to_hold_not_what_it_may() -> None:
    queue = [ticket(i, 90, expected_tokens=20) for i in range(6)]
    assert admitted(plan_admission(state(queue), 0.0)) == ["r0", "r1", "r2", "r3", "r4"]


def test_the_cache_may_be_given_away_more_than_once() -> None:
    queue = [ticket(i, 50) for i in range(9)]
    assert len(plan_admission(state(queue, load(overcommit=3.0)), 0.0)) == 6


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_smaller_one() -> None:
    assert plan_admission(state([ticket(1, 80), ticket(2, 1)], load(tokens=30)), 0.0) == []


def test_a_request_that_only_a_lost_verifier_could_serve_holds_up_nobody() -> None:
    patient = ticket(1, 500, waits_until=9.0)
    assert plan_admission(state([patient, ticket(2)]), 0.0) == [AdmitRequest(RequestId("r2"), A)]
    assert plan_admission(state([patient]), 9.0) == [RefuseRequest(RequestId("r1"))]
    assert plan_admission(state([ticket(1, 500)]), 0.0) == [RefuseRequest(RequestId("r1"))]


def test_a_higher_priority_goes_first() -> None:
    queue = [ticket(1, 60), ticket(2, 60, priority=1)]
    assert admitted(plan_admission(state(queue), 0.0)) == ["r2"]


def test_a_higher_priority_is_placed_beyond_the_room_because_others_are_preempted_for_it() -> None:
    full = load(tokens=95)
    assert plan_admission(state([ticket(1, 60)], full), 0.0) == []
    high = [ticket(1, 60, priority=5), ticket(2, 60, priority=5)]
    assert plan_admission(state(high, full), 0.0) == [
        AdmitRequest(RequestId("r1"), A, needs_preemption=True)
    ]


def test_nobody_is_preempted_for_an_equal_or_lesser_priority() -> None:
    full = load(assigned_by_priority={5: AssignedLoad(1, 95)})
    assert plan_admission(state([ticket(1, 60, priority=5)], full), 0.0) == []
    assert plan_admission(state([ticket(1, 60, priority=4)], full), 0.0) == []


def test_room_is_preferred_to_preempting() -> None:
    loads = load(A, tokens=95), load(B, tokens=30)
    assert plan_admission(state([ticket(1, 60, priority=5)], *loads), 0.0) == [
        AdmitRequest(RequestId("r1"), B)
    ]


def test_few_are_made_to_wait_at_once() -> None:
    high = ticket(1, 10, priority=1)
    assert (
        plan_admission(state([high], load(tokens=95, sessions=8 + MAX_EXCESS_SESSIONS)), 0.0) == []
    )
    assert admitted(
        plan_admission(state([high], load(tokens=95, sessions=7 + MAX_EXCESS_SESSIONS)), 0.0)
    )


def test_an_expired_request_leaves_even_behind_one_that_blocks() -> None:
    queue = [ticket(1, 80), ticket(2, 1, deadline=5.0)]
    blocked = state(queue, load(tokens=50))
    assert plan_admission(blocked, 4.9) == []
    assert plan_admission(blocked, 5.0) == [ExpireRequest(RequestId("r2"))]


def test_without_a_healthy_verifier_nobody_waits() -> None:
    assert plan_admission(AdmissionState(queue=(ticket(1),), verifiers=()), 0.0) == [
        RefuseRequest(RequestId("r1"))
    ]


def test_the_verifier_with_the_largest_free_share_is_chosen() -> None:
    loads = (load(A, tokens=50), load(B, total_tokens=1000, tokens=400))
    assert plan_admission(state([ticket(1)], *loads), 0.0) == [AdmitRequest(RequestId("r1"), B)]


def test_what_other_routers_hold_there_counts() -> None:
    loads = (load(A, others_tokens=60), load(B, tokens=50))
    assert plan_admission(state([ticket(1)], *loads), 0.0) == [AdmitRequest(RequestId("r1"), B)]
    assert plan_admission(state([ticket(1, 50)], load(A, tokens=10, others_tokens=60)), 0.0) == []


def test_sessions_of_one_decision_spread_over_equal_verifiers() -> None:
    actions = plan_admission(state([ticket(i) for i in range(4)], load(A), load(B)), 0.0)
    assert [action.verifier_id for action in actions if isinstance(action, AdmitRequest)] == [
        A,
        B,
        A,
        B,
    ]


def test_a_verifier_with_all_its_sessions_takes_no_more() -> None:
    assert plan_admission(state([ticket(1)], load(tokens=8, sessions=8)), 0.0) == []


def test_a_draining_verifier_takes_none() -> None:
    loads = load(A, is_draining=True), load(B, tokens=90)
    assert plan_admission(state([ticket(1)], *loads), 0.0) == [AdmitRequest(RequestId("r1"), B)]
    assert plan_admission(state([ticket(1)], loads[0]), 0.0) == [RefuseRequest(RequestId("r1"))]


def test_whoever_waits_at_a_verifier_goes_before_new_sessions() -> None:
    prompt = ticket(1, 10, prompt_tokens=10)
    assert plan_admission(state([prompt], load(tokens=50, waiting=1, free_tokens=9)), 0.0) == []
    assert admitted(
        plan_admission(state([prompt], load(tokens=50, waiting=1, free_tokens=10)), 0.0)
    )
    assert admitted(plan_admission(state([prompt], load(waiting=1)), 0.0)), "those of other routers"


def test_sessions_are_counted_in_whole_blocks() -> None:
    assert plan_admission(state([ticket(i, 1) for i in range(9)], load(block_tokens=16)), 0.0) == [
        AdmitRequest(RequestId(f"r{i}"), A) for i in range(6)
    ]


def test_a_verifier_that_refused_is_left_alone_for_a_moment() -> None:
    refused = state([ticket(1)], load(not_before=2.0))
    assert plan_admission(refused, 1.9) == []
    assert next_change_at(refused, 1.9) == 2.0
    assert plan_admission(refused, 2.0) == [AdmitRequest(RequestId("r1"), A)]


def test_a_tenant_at_its_bound_is_passed_by() -> None:
    big, small = TenantId("big"), TenantId("small")
    queue = [ticket(i, tenant=big) for i in range(3)] + [ticket(9, tenant=small)]
    assert admitted(plan_admission(state(queue, tenant_room={big: 2}), 0.0)) == ["r0", "r1", "r9"]


def test_the_next_wake_is_the_nearest_deadline_ahead() -> None:
    queue = [ticket(1, 500, deadline=7.0), ticket(2, deadline=3.0), ticket(3)]
    assert next_change_at(state(queue), 1.0) == 3.0
    assert next_change_at(state(queue), 3.0) == 7.0
    assert next_change_at(state([]), 0.0) is None


TICKETS = st.lists(
    st.builds(
        ticket,
        st.integers(0, 10_000),
        st.integers(1, 120),
        priority=st.integers(0, 2),
        deadline=st.none() | st.floats(0, 10),
    ),
    max_size=20,
    unique_by=lambda t: t.sequence,
)


@given(admission_requests=TICKETS, now=st.floats(0, 10), block=st.integers(1, 20))
def test_no_priority_is_given_more_than_there_is(
    admission_requests: list[AdmissionRequest], now: float, block: int
) -> None:
    loads = [load(A, block_tokens=block), load(B, total_tokens=50, max_sessions=2)]
    by_id = {t.request_id: t for t in admission_requests}
    after = {item.verifier_id: item for item in loads}
    seen = set()
    for action in plan_admission(
        AdmissionState(queue=tuple(admission_requests), verifiers=tuple(loads)), now
    ):
        assert action.request_id not in seen
        seen.add(action.request_id)
        if isinstance(action, AdmitRequest):
            chosen, placed = after[action.verifier_id], by_id[action.request_id]
            assert action.needs_preemption is not chosen.fits_now(placed, now)
            chosen = after[action.verifier_id] = chosen.with_session(placed)
            above = chosen.from_priority(placed.priority)
            assert above.tokens <= chosen.total_tokens
            assert above.sessions <= chosen.max_sessions
