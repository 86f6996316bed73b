"""Admission decides by plain facts and a number for the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_router.admission import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    Admit,
    Expire,
    Refuse,
    State,
    Ticket,
    VerifierLoad,
    next_wake,
    plan,
    retry_hint_s,
)

from outrider.ids import RequestId, VerifierId

A, B = VerifierId("a"), VerifierId("b")


def load(name: VerifierId = A, **changes: object) -> VerifierLoad:
    values: dict[str, object] = {"total_tokens": 100, "max_sessions": 8} | changes
    return VerifierLoad(verifier_id=name, **values)  # type: ignore[arg-type]


def ticket(number: int, kv_tokens: int = 10, **changes: object) -> Ticket:
    return Ticket(
        request_id=RequestId(f"r{number}"),
        kv_tokens=kv_tokens,
        sequence=number,
        **changes,  # type: ignore[arg-type]
    )


def state(tickets: list[Ticket], *loads: VerifierLoad) -> State:
    return State(queue=tuple(tickets), verifiers=loads or (load(),))


def test_requests_are_admitted_in_order_of_arrival_until_the_budget_is_given_away() -> None:
    actions = plan(state([ticket(2, 60), ticket(1, 40), ticket(3, 1)]), 0.0)
    assert actions == [Admit(RequestId("r1"), A), Admit(RequestId("r2"), A)]


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_smaller_one() -> None:
    assert plan(state([ticket(1, 80), ticket(2, 1)], load(reserved_tokens=30)), 0.0) == []


def test_a_higher_priority_goes_first() -> None:
    queue = [ticket(1, 60), ticket(2, 60, priority=1)]
    assert plan(state(queue), 0.0) == [Admit(RequestId("r2"), A)]


def test_an_expired_request_leaves_even_behind_one_that_blocks() -> None:
    queue = [ticket(1, 80), ticket(2, 1, deadline=5.0)]
    blocked = state(queue, load(reserved_tokens=50))
    assert plan(blocked, 4.9) == []
    assert plan(blocked, 5.0) == [Expire(RequestId("r2"))]


def test_without_a_healthy_verifier_nobody_waits() -> None:
    assert plan(State(queue=(ticket(1),), verifiers=()), 0.0) == [Refuse(RequestId("r1"))]


def test_the_verifier_with_the_largest_free_share_is_chosen() -> None:
    loads = (load(A, reserved_tokens=50), load(B, total_tokens=1000, reserved_tokens=400))
    assert plan(state([ticket(1)], *loads), 0.0) == [Admit(RequestId("r1"), B)]


def test_sessions_of_one_decision_spread_over_equal_verifiers() -> None:
    actions = plan(state([ticket(i) for i in range(4)], load(A), load(B)), 0.0)
    assert [action.verifier_id for action in actions if isinstance(action, Admit)] == [A, B, A, B]


def test_a_verifier_with_all_its_sessions_takes_no_more() -> None:
    assert plan(state([ticket(1)], load(sessions=8)), 0.0) == []


def test_reservations_are_whole_blocks() -> None:
    assert plan(state([ticket(i, 1) for i in range(9)], load(block_tokens=16)), 0.0) == [
        Admit(RequestId(f"r{i}"), A) for i in range(6)
    ]


def test_a_verifier_that_refused_is_left_alone_for_a_moment() -> None:
    refused = state([ticket(1)], load(not_before=2.0))
    assert plan(refused, 1.9) == []
    assert next_wake(refused, 1.9) == 2.0
    assert plan(refused, 2.0) == [Admit(RequestId("r1"), A)]


def test_the_next_wake_is_the_nearest_deadline_ahead() -> None:
    queue = [ticket(1, 500, deadline=7.0), ticket(2, deadline=3.0), ticket(3)]
    assert next_wake(state(queue), 1.0) == 3.0
    assert next_wake(state(queue), 3.0) == 7.0
    assert next_wake(state([]), 0.0) is None


def test_the_retry_hint_grows_with_the_queue_within_bounds() -> None:
    hints = [retry_hint_s(waiting, 4, 2.0) for waiting in (0, 16, 64, 10_000)]
    assert hints == sorted(hints)
    assert hints[0] == MIN_RETRY_S and hints[-1] == MAX_RETRY_S


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


@given(tickets=TICKETS, now=st.floats(0, 10), block=st.integers(1, 20))
def test_no_decision_overcommits_a_verifier(tickets: list[Ticket], now: float, block: int) -> None:
    loads = [load(A, block_tokens=block), load(B, total_tokens=50, max_sessions=2)]
    by_id = {t.request_id: t for t in tickets}
    after = {item.verifier_id: item for item in loads}
    seen = set()
    for action in plan(State(queue=tuple(tickets), verifiers=tuple(loads)), now):
        assert action.request_id not in seen
        seen.add(action.request_id)
        if isinstance(action, Admit):
            kv_tokens = by_id[action.request_id].kv_tokens
            assert after[action.verifier_id].fits_now(kv_tokens, now)
            after[action.verifier_id] = after[action.verifier_id].with_session(kv_tokens)
