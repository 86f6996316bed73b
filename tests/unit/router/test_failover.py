"""Who goes on after a loss, how often, and what is said to whom that does not."""

from __future__ import annotations

import pytest
from outrider_router.admission.policy import (
    Admit,
    Expire,
    Refuse,
    State,
    VerifierLoad,
    next_wake,
    plan,
)
from outrider_router.admission.wait_order import Ticket
from outrider_router.requests.failover import (
    LONGEST_PAUSE_S,
    MAX_REFUSALS,
    Cause,
    Past,
    cause_of,
    end_of,
    goes_on,
    incomplete,
    pause_s,
)

from outrider.errors import (
    CancelledRequestError,
    ConnectionLostError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import RequestId, VerifierId
from outrider.wire.messages import FinishReason

R, S, V = RequestId("r"), RequestId("s"), VerifierId("v")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionLostError("x", reason="PEER_LOST"), Cause.VERIFIER_LOST),
        (UnavailableError("x", reason="DEVICE_LOST"), Cause.VERIFIER_LOST),
        (UnavailableError("x", reason="SESSION_LOST"), Cause.VERIFIER_LOST),
        (UnavailableError("x", reason="DRAINING"), Cause.DRAINING),
        (InternalError("x", reason="ROUND_FAILED"), Cause.FAILED),
        (InternalError("x", reason="MODEL_OUTPUT_INVALID"), None),
        (ResourceExhaustedError("x"), Cause.REFUSED),
        (InvalidRequestError("x"), None),
        (FailedPreconditionError("x"), None),
        (CancelledRequestError("x"), None),
        (DeadlineExceededError("x"), None),
    ],
)
def test_a_fault_of_the_request_is_told_from_one_of_its_verifier(
    error: OutriderError, cause: Cause | None
) -> None:
    assert cause_of(error) is cause


@pytest.mark.parametrize("cause", [Cause.VERIFIER_LOST, Cause.FAILED])
def test_losses_are_bounded_in_number_and_in_time(cause: Cause) -> None:
    assert goes_on(cause, Past(losses=5), max_failovers=5)
    assert not goes_on(cause, Past(losses=6), max_failovers=5)
    assert not goes_on(cause, Past(losses=1, in_time=False), max_failovers=5)
    assert not goes_on(cause, Past(losses=1), max_failovers=0)


def test_a_drain_is_no_blame_and_a_refusal_neither_unless_nobody_else_is_there() -> None:
    assert goes_on(Cause.DRAINING, Past(losses=9), max_failovers=0)
    assert not goes_on(Cause.DRAINING, Past(in_time=False), max_failovers=5)
    many = Past(refusals=10 * MAX_REFUSALS)
    assert goes_on(Cause.REFUSED, many, max_failovers=0)
    assert not goes_on(Cause.REFUSED, Past(refusals=MAX_REFUSALS, alone=True), max_failovers=5)
    assert not goes_on(None, Past(), max_failovers=5)


def test_the_first_loss_costs_no_pause_and_later_ones_longer_and_longer_ones() -> None:
    pauses = [pause_s(losses) for losses in range(1, 30)]
    assert pauses[0] == 0.0 and pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE_S


def test_an_end_that_nobody_could_tell_of_is_seen_in_the_tokens() -> None:
    assert end_of([], stop_ids=(7,), max_new_tokens=2) is None
    assert end_of([7, 1], stop_ids=(7,), max_new_tokens=3) is None
    assert end_of([1, 7], stop_ids=(7,), max_new_tokens=2) is FinishReason.STOP_TOKEN
    assert end_of([1, 2], stop_ids=(7,), max_new_tokens=2) is FinishReason.LENGTH


def test_who_gives_up_says_what_was_emitted() -> None:
    error = incomplete(Cause.VERIFIER_LOST, Past(losses=3, emitted=17))
    assert "17 tokens" in error.message and "3 times" in error.message
    assert error.reason == "VERIFIER_LOST" and error.retry_after_s is None


def ticket(name: RequestId = R, sequence: int = 0, **more: object) -> Ticket:
    return Ticket(request_id=name, kv_tokens=8, sequence=sequence, **more)  # type: ignore[arg-type]


def load(name: VerifierId = V, **more: object) -> VerifierLoad:
    facts = {"total_tokens": 16, "max_sessions": 4, "free_tokens": 16} | more
    return VerifierLoad(verifier_id=name, **facts)  # type: ignore[arg-type]


def test_who_has_lost_its_verifier_waits_for_one_until_its_patience_is_over() -> None:
    state = State(queue=(ticket(patient_until=5.0), ticket(S, 1)), verifiers=())
    assert plan(state, 0.0) == [Refuse(S)]
    assert next_wake(state, 0.0) == 5.0
    assert plan(state, 5.0) == [Refuse(R), Refuse(S)]
    late = State(queue=(ticket(patient_until=5.0, deadline=3.0),), verifiers=())
    assert plan(late, 3.0) == [Expire(R)]


def test_who_waits_for_a_larger_verifier_holds_up_nobody() -> None:
    small = load(total_tokens=7)
    state = State(
        queue=(ticket(patient_until=5.0), Ticket(request_id=S, kv_tokens=4, sequence=1)),
        verifiers=(small,),
    )
    assert plan(state, 0.0) == [Admit(S, V)]


def test_nothing_is_placed_on_a_verifier_that_drains() -> None:
    draining = load(draining=True)
    assert plan(State(queue=(ticket(),), verifiers=(draining,)), 0.0) == [Refuse(R)]
    waits = ticket(patient_until=5.0)
    assert plan(State(queue=(waits,), verifiers=(draining,)), 0.0) == []
    other = load(VerifierId("w"), free_tokens=0)
    assert plan(State(queue=(waits,), verifiers=(draining, other)), 0.0) == [
        Admit(R, VerifierId("w"))
    ]
