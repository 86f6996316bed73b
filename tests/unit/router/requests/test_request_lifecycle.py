"""Phases of a request: which transitions there are, and what a failure does in each phase."""

from __future__ import annotations

from itertools import pairwise

import pytest
from outrider_router.requests.running_requests import (
    ALLOWED_TRANSITIONS,
    INTERRUPTIBLE_PHASES,
    Interrupt,
    PhaseTransitionError,
    RequestLifecycle,
    RequestPhase,
)

from outrider.errors import CancelledRequestError, OutriderError, UnavailableError

P = RequestPhase
PATHS = {
    P.ACCEPTED: (),
    P.VALIDATING: (P.VALIDATING,),
    P.PENDING: (P.VALIDATING, P.PENDING),
    P.BACKING_OFF: (P.VALIDATING, P.PENDING, P.BACKING_OFF),
    P.QUEUED: (P.VALIDATING, P.PENDING, P.QUEUED),
    P.STREAMING: (P.VALIDATING, P.PENDING, P.STREAMING),
    P.RELOCATING: (P.VALIDATING, P.PENDING, P.STREAMING, P.RELOCATING),
    P.FAILING: (P.FAILING,),
    P.ENDED: (P.ENDED,),
}
"""A way to each phase from the first one."""
ERROR = CancelledRequestError("the client went away", reason="ABORTED")


def interrupt_of(phase: RequestPhase) -> Interrupt | None:
    return (lambda _error: None) if phase in INTERRUPTIBLE_PHASES else None


def lifecycle_in(phase: RequestPhase, interrupt: Interrupt | None = None) -> RequestLifecycle:
    lifecycle = RequestLifecycle()
    for step in PATHS[phase]:
        last = interrupt if step is phase else None
        lifecycle.enter(step, last or interrupt_of(step))
    assert lifecycle.phase is phase
    return lifecycle


def test_the_table_has_every_phase_and_a_way_to_each() -> None:
    assert set(ALLOWED_TRANSITIONS) == set(PATHS) == set(RequestPhase)
    for path in PATHS.values():
        for before, after in pairwise((P.ACCEPTED, *path)):
            assert after in ALLOWED_TRANSITIONS[before]


@pytest.mark.parametrize("after", RequestPhase)
@pytest.mark.parametrize("before", RequestPhase)
def test_transitions_of_the_table_are_made_and_all_others_refused(
    before: RequestPhase, after: RequestPhase
) -> None:
    lifecycle = lifecycle_in(before)
    if after in ALLOWED_TRANSITIONS[before]:
        lifecycle.enter(after, interrupt_of(after))
        assert lifecycle.phase is after
    else:
        with pytest.raises(PhaseTransitionError, match=f"{before.value} cannot become"):
            lifecycle.enter(after, interrupt_of(after))
        assert lifecycle.phase is before


@pytest.mark.parametrize("phase", [phase for phase in P if phase is not P.ACCEPTED])
def test_a_phase_has_an_interrupt_if_and_only_if_a_failure_must_end_a_wait(
    phase: RequestPhase,
) -> None:
    before = lifecycle_in((P.ACCEPTED, *PATHS[phase])[-2])
    wrong = None if phase in INTERRUPTIBLE_PHASES else lambda _error: None
    with pytest.raises(PhaseTransitionError, match="interrupt"):
        before.enter(phase, wrong)


@pytest.mark.parametrize("phase", RequestPhase)
def test_a_failure_interrupts_the_phase_once_and_the_first_error_counts(
    phase: RequestPhase,
) -> None:
    heard: list[OutriderError] = []
    lifecycle = lifecycle_in(phase, heard.append if phase in INTERRUPTIBLE_PHASES else None)
    is_alive = phase not in (P.FAILING, P.ENDED)
    assert lifecycle.fail(ERROR) is is_alive
    assert not lifecycle.fail(UnavailableError("the router stops", reason="SHUTDOWN"))
    assert heard == ([ERROR] if phase in INTERRUPTIBLE_PHASES else [])
    assert lifecycle.phase is (P.FAILING if is_alive else phase)
    assert lifecycle.error is (ERROR if is_alive else None)


def test_the_interrupt_of_a_phase_that_is_over_is_not_called() -> None:
    heard: list[OutriderError] = []
    lifecycle = lifecycle_in(P.PENDING)
    with lifecycle.during(P.QUEUED, heard.append):
        assert lifecycle.phase is P.QUEUED
    assert lifecycle.phase is P.PENDING
    assert lifecycle.fail(ERROR) and heard == []


def test_a_request_that_fails_in_a_phase_stays_failing_and_begins_no_other() -> None:
    lifecycle = lifecycle_in(P.PENDING)
    with lifecycle.during(P.QUEUED, lambda _error: None):
        lifecycle.fail(ERROR)
    assert lifecycle.phase is P.FAILING
    with (
        pytest.raises(CancelledRequestError) as caught,
        lifecycle.during(P.QUEUED, lambda _error: None),
    ):
        raise AssertionError("the block was entered")
    assert caught.value is ERROR
    lifecycle.enter(P.ENDED)


def test_a_session_that_relocates_is_interrupted_like_any_other() -> None:
    heard: list[OutriderError] = []
    lifecycle = lifecycle_in(P.PENDING)
    lifecycle.begin_phase(P.STREAMING, heard.append)
    lifecycle.relocate()
    assert lifecycle.phase is P.RELOCATING and lifecycle.has_session
    lifecycle.fail(ERROR)
    assert heard == [ERROR] and not lifecycle.has_session
