"""Who goes on after a loss, how often, and what is said to whom that does not."""

from __future__ import annotations

import pytest
from outrider_router.admission.policy import (
    AdmissionRequest,
    AdmissionState,
    AdmitRequest,
    ExpireRequest,
    RefuseRequest,
    VerifierLoad,
    next_change_at,
    plan_admission,
)
from outrider_router.base.reasons import FailoverCause
from outrider_router.requests.failover import (
    MAX_BACKOFF_S,
    MAX_REFUSALS,
    RequestHistory,
    failover_cause,
    implied_finish,
    incomplete_error,
    pause_s,
    should_retry,
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
        (ConnectionLostError("x", reason="PEER_LOST"), FailoverCause.VERIFIER_LOST),
        (UnavailableError("x", reason="DEVICE_LOST"), FailoverCause.VERIFIER_LOST),
        (UnavailableError("x", reason="SESSION_LOST"), FailoverCause.VERIFIER_LOST),
        (UnavailableError("x", reason="DRAINING"), FailoverCause.DRAINING),
        (InternalError("x", reason="ROUND_FAILED"), FailoverCause.FAILED),
        (InternalError("x", reason="MODEL_OUTPUT_INVALID"), None),
        (ResourceExhaustedError("x"), FailoverCause.REFUSED),
        (InvalidRequestError("x"), None),
        (FailedPreconditionError("x"), None),
        (CancelledRequestError("x"), None),
        (DeadlineExceededError("x"), None),
    ],
)
def test_a_fault_of_the_request_is_told_from_one_of_its_verifier(
    error: OutriderError, cause: FailoverCause | None
) -> None:
    assert failover_cause(error) is cause


@pytest.mark.parametrize("cause", [FailoverCause.VERIFIER_LOST, FailoverCause.FAILED])
def test_losses_are_bounded_in_number_and_in_time(cause: FailoverCause) -> None:
    assert should_retry(cause, RequestHistory(losses=5), max_failovers=5)
    assert not should_retry(cause, RequestHistory(losses=6), max_failovers=5)
    assert not should_retry(cause, RequestHistory(losses=1, is_in_time=False), max_failovers=5)
    assert not should_retry(cause, RequestHistory(losses=1), max_failovers=0)


def test_a_drain_is_no_blame_and_a_refusal_neither_unless_nobody_else_is_there() -> None:
    assert should_retry(FailoverCause.DRAINING, RequestHistory(losses=9), max_failovers=0)
    assert not should_retry(
        FailoverCause.DRAINING, RequestHistory(is_in_time=False), max_failovers=5
    )
    many = RequestHistory(refusals=10 * MAX_REFUSALS)
    assert should_retry(FailoverCause.REFUSED, many, max_failovers=0)
    assert not should_retry(
        FailoverCause.REFUSED, RequestHistory(refusals=MAX_REFUSALS, is_alone=True), max_failovers=5
    )
    assert not should_retry(None, RequestHistory(), max_failovers=5)


def test_the_first_loss_costs_no_pause_and_later_ones_longer_and_longer_ones() -> None:
    pauses = [pause_s(losses) for losses in range(1, 30)]
    assert pauses[0] == 0.0 and pauses == sorted(pauses) and pauses[-1] == MAX_BACKOFF_S


def test_an_end_that_nobody_could_tell_of_is_seen_in_the_tokens() -> None:
    assert implied_finish([], stop_ids=(7,), max_new_tokens=2) is None
    assert implied_finish([7, 1], stop_ids=(7,), max_new_tokens=3) is None
    assert implied_finish([1, 7], stop_ids=(7,), max_new_tokens=2) is FinishReason.STOP_TOKEN
    assert implied_finish([1, 2], stop_ids=(7,), max_new_tokens=2) is FinishReason.LENGTH


def test_who_gives_up_says_what_was_emitted() -> None:
    error = incomplete_error(FailoverCause.VERIFIER_LOST, RequestHistory(losses=3, emitted=17))
    assert "17 tokens" in error.message and "3 times" in error.message
    assert error.reason == "VERIFIER_LOST" and error.retry_after_s is None


def ticket(name: RequestId = R, sequence: int = 0, **more: object) -> AdmissionRequest:
    return AdmissionRequest(request_id=name, kv_tokens=8, sequence=sequence, **more)  # type: ignore[arg-type]


def load(name: VerifierId = V, **more: object) -> VerifierLoad:
    facts = {"total_tokens": 16, "max_sessions": 4, "free_tokens": 16} | more
    return VerifierLoad(verifier_id=name, **facts)  # type: ignore[arg-type]


def test_who_has_lost_its_verifier_waits_for_one_until_its_patience_is_over() -> None:
    state = AdmissionState(queue=(ticket(waits_until=5.0), ticket(S, 1)), verifiers=())
    assert plan_admission(state, 0.0) == [RefuseRequest(S)]
    assert next_change_at(state, 0.0) == 5.0
    assert plan_admission(state, 5.0) == [RefuseRequest(R), RefuseRequest(S)]
    late = AdmissionState(queue=(ticket(waits_until=5.0, deadline=3.0),), verifiers=())
    assert plan_admission(late, 3.0) == [ExpireRequest(R)]


def test_who_waits_for_a_larger_verifier_holds_up_nobody() -> None:
    small = load(total_tokens=7)
    state = AdmissionState(
        queue=(ticket(waits_until=5.0), AdmissionRequest(request_id=S, kv_tokens=4, sequence=1)),
        verifiers=(small,),
    )
    assert plan_admission(state, 0.0) == [AdmitRequest(S, V)]


def test_nothing_is_placed_on_a_verifier_that_drains() -> None:
    draining = load(is_draining=True)
    assert plan_admission(AdmissionState(queue=(ticket(),), verifiers=(draining,)), 0.0) == [
        RefuseRequest(R)
    ]
    waits = ticket(waits_until=5.0)
    assert plan_admission(AdmissionState(queue=(waits,), verifiers=(draining,)), 0.0) == []
    other = load(VerifierId("w"), free_tokens=0)
    assert plan_admission(AdmissionState(queue=(waits,), verifiers=(draining, other)), 0.0) == [
        AdmitRequest(R, VerifierId("w"))
    ]
