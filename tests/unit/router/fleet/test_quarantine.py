"""When a drafter gets no sessions, and when it gets one again, is a plain decision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_router.base.reasons import QuarantineReason
from outrider_router.fleet.quarantine import (
    BREAKER_RESET_S,
    JITTER_SHARE,
    MAX_BACKOFF_S,
    MAX_INVALID_MESSAGES,
    MAX_PROBE_S,
    MIN_BACKOFF_S,
    MIN_PROBE_ANSWERS,
    MIN_SLOW_POLLS,
    BreakerState,
    CircuitBreaker,
    DrafterEvidence,
    Quarantine,
)

from outrider.ids import DrafterId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import AttachedDrafter
from tests.unit.router.fleet.test_compatibility import VERIFIER

MIDDLE = 0.5
"""No jitter."""
WELL = DrafterEvidence(sessions=4, answers=100)
LOOK_S = 0.5


def judged(
    breaker: CircuitBreaker, *looks: DrafterEvidence, start: float = 0.0
) -> list[QuarantineReason | None]:
    """What looks at these find, one after the other."""
    times = (start + LOOK_S * number for number in range(len(looks)))
    return [breaker.update(seen, now, MIDDLE) for seen, now in zip(looks, times, strict=True)]


def opened(seen: DrafterEvidence = WELL) -> CircuitBreaker:
    """A breaker that has just opened, at time 0, because its drafter was silent."""
    breaker = CircuitBreaker()
    assert breaker.update(replace(seen, silent_s=1.0), 0.0, MIDDLE) is QuarantineReason.SILENT
    return breaker


def probing(seen: DrafterEvidence = WELL) -> CircuitBreaker:
    """A breaker that probes from `MIN_BACKOFF_S` on."""
    breaker = opened(seen)
    assert breaker.update(seen, MIN_BACKOFF_S, MIDDLE) is None
    assert breaker.state is BreakerState.PROBING and breaker.max_sessions == 1
    return breaker


def test_a_drafter_that_answers_is_let_be() -> None:
    breaker = CircuitBreaker()
    looks = [replace(WELL, answers=100 + 40 * n, missed=3 * n, invalid=n) for n in range(50)]
    assert judged(breaker, *looks) == [None] * 50
    assert breaker.max_sessions is None and breaker.reason is None


def test_what_was_before_the_first_look_is_held_against_nobody() -> None:
    assert judged(
        CircuitBreaker(), DrafterEvidence(sessions=4, answers=3, missed=900, invalid=900)
    ) == [None]


@pytest.mark.parametrize(
    ("worse", "reason"),
    [
        ({"silent_s": 0.8}, QuarantineReason.SILENT),
        ({"invalid": MAX_INVALID_MESSAGES}, QuarantineReason.WRONG),
        ({"answers": 100, "invalid": MAX_INVALID_MESSAGES // 2}, QuarantineReason.WRONG),
    ],
)
def test_one_look_is_enough_for_the_silent_and_the_wrong(
    worse: dict[str, float], reason: QuarantineReason
) -> None:
    breaker = CircuitBreaker()
    bad = replace(WELL, **{"answers": 101, **worse})  # type: ignore[arg-type]
    assert judged(breaker, WELL, bad) == [None, reason]
    assert (
        breaker.state is BreakerState.OPEN
        and breaker.max_sessions == 0
        and breaker.reason is reason
    )


def test_nobody_is_silent_who_has_no_sessions() -> None:
    assert judged(CircuitBreaker(), DrafterEvidence(sessions=0, silent_s=100.0)) == [None]


@pytest.mark.parametrize("kind", ["late", "far"])
def test_slow_is_who_is_slow_look_after_look(kind: str) -> None:
    def slow(number: int) -> DrafterEvidence:
        if kind == "late":
            return DrafterEvidence(sessions=4, answers=100 + number, missed=9 * number)
        return DrafterEvidence(sessions=4, answers=100 + number, answer_ms=90.0, soonest_ms=10.0)

    breaker = CircuitBreaker()
    looks = [slow(number) for number in range(MIN_SLOW_POLLS + 1)]
    assert judged(breaker, *looks) == [None] * MIN_SLOW_POLLS + [QuarantineReason.SLOW]
    # A machine that was busy for a moment.
    calm = CircuitBreaker()
    good = replace(slow(2), answers=500, answer_ms=10.0)
    more = [replace(slow(n), answers=500 + n) for n in range(3, 2 + MIN_SLOW_POLLS)]
    assert judged(calm, *looks[:2], good, *more) == [None] * (2 + MIN_SLOW_POLLS)


def test_a_drafter_that_is_slower_than_others_by_little_is_for_the_weights() -> None:
    breaker = CircuitBreaker()
    near = [
        DrafterEvidence(sessions=4, answers=n, answer_ms=40.0, soonest_ms=1.0)
        for n in range(100, 120)
    ]
    assert judged(breaker, *near) == [None] * 20
    alone = [replace(seen, answer_ms=900.0, soonest_ms=0.0) for seen in near]
    assert judged(breaker, *alone) == [None] * 20


def test_a_good_probe_closes_and_a_bad_one_waits_twice_as_long() -> None:
    breaker = probing()
    assert (
        breaker.update(replace(WELL, sessions=1, answers=100 + MIN_PROBE_ANSWERS), 1.5, MIDDLE)
        is None
    )
    assert (
        breaker.state is BreakerState.CLOSED
        and breaker.max_sessions is None
        and breaker.reason is None
    )
    breaker = probing()
    bad = replace(WELL, sessions=1, silent_s=1.0)
    assert breaker.update(bad, 2.0, MIDDLE) is QuarantineReason.SILENT
    assert breaker.until == pytest.approx(2.0 + 2.0 * MIN_BACKOFF_S)
    assert breaker.update(bad, 3.9, MIDDLE) is None and breaker.state is BreakerState.OPEN
    assert breaker.update(bad, 4.0, MIDDLE) is None and breaker.state is BreakerState.PROBING


def test_a_probe_that_has_not_begun_proves_nothing() -> None:
    breaker = probing()
    empty = replace(WELL, sessions=0)
    for number in range(100):
        assert breaker.update(empty, MIN_BACKOFF_S + number, MIDDLE) is None
    assert breaker.state is BreakerState.PROBING
    # One that wants no drafts is taken for a good one after a while.
    quiet = replace(WELL, sessions=1)
    assert breaker.update(quiet, 101.0, MIDDLE) is None and breaker.state is BreakerState.PROBING
    assert breaker.update(quiet, 101.0 + MAX_PROBE_S, MIDDLE) is None
    assert breaker.state is BreakerState.CLOSED


def test_who_was_well_for_long_begins_anew() -> None:
    breaker = probing()
    good = replace(WELL, sessions=1, answers=200)
    breaker.update(good, 2.0, MIDDLE)
    breaker.update(good, 2.0 + BREAKER_RESET_S, MIDDLE)
    breaker.update(replace(good, silent_s=1.0), 3.0 + BREAKER_RESET_S, MIDDLE)
    assert breaker.until == pytest.approx(3.0 + BREAKER_RESET_S + MIN_BACKOFF_S)
    # And who was not does not.
    breaker = probing()
    breaker.update(good, 2.0, MIDDLE)
    breaker.update(replace(good, silent_s=1.0), 3.0, MIDDLE)
    assert breaker.until == pytest.approx(3.0 + 2.0 * MIN_BACKOFF_S)


COUNTS = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 12))


@given(
    looks=st.lists(
        st.tuples(
            st.integers(0, 3),
            COUNTS,
            st.floats(0, 3),
            st.floats(0, 200),
            st.floats(0, 200),
            st.floats(0, 0.999),
            st.floats(0.01, 100),
        ),
        max_size=60,
    )
)
def test_every_history_keeps_the_bounds(
    looks: list[tuple[int, tuple[int, int, int], float, float, float, float, float]],
) -> None:
    breaker, now, counts, ill_in_a_row = CircuitBreaker(), 0.0, (0, 0, 0), 0
    for sessions, new, silent_s, answer_ms, soonest_ms, chance, pause in looks:
        now += pause
        counts = (counts[0] + new[0], counts[1] + new[1], counts[2] + new[2])
        before = breaker.state
        seen = DrafterEvidence(
            sessions=sessions,
            answers=counts[0],
            missed=counts[1],
            invalid=counts[2],
            silent_s=silent_s,
            answer_ms=answer_ms,
            soonest_ms=soonest_ms,
        )
        reason = breaker.update(seen, now, chance)
        # It opens for a reason, stays open for the back-off, and goes by the probe alone.
        assert (reason is not None) == (
            breaker.state is BreakerState.OPEN and before is not BreakerState.OPEN
        )
        assert (breaker.reason is None) == (breaker.state is BreakerState.CLOSED)
        assert (before, breaker.state) != (BreakerState.OPEN, BreakerState.CLOSED)
        if before is BreakerState.OPEN:
            assert (breaker.state is BreakerState.PROBING) == (now >= breaker.until)
        if reason is not None:
            ill_in_a_row = ill_in_a_row + 1 if before is BreakerState.PROBING else 1
            backoff_s = breaker.until - now
            assert (
                (1 - JITTER_SHARE) * MIN_BACKOFF_S * 0.999
                <= backoff_s
                <= (1 + JITTER_SHARE) * MAX_BACKOFF_S * 1.001
            )
            least_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** (ill_in_a_row - 1))
            assert backoff_s >= (1 - JITTER_SHARE) * least_s * 0.999


@settings(max_examples=50)
@given(st.lists(COUNTS, min_size=1, max_size=40), st.floats(0, 0.999))
def test_a_drafter_that_is_well_for_good_is_let_in_again(
    past: list[tuple[int, int, int]], chance: float
) -> None:
    breaker, counts, now = CircuitBreaker(), (0, 0, 0), 0.0
    for new in past:
        now += LOOK_S
        counts = (counts[0] + new[0], counts[1] + new[1], counts[2] + new[2])
        seen = DrafterEvidence(sessions=1, answers=counts[0], missed=counts[1], invalid=counts[2])
        breaker.update(seen, now, chance)
    for _ in range(round((1 + JITTER_SHARE) * MAX_BACKOFF_S / LOOK_S) + 4):
        now += LOOK_S
        seen = replace(seen, answers=seen.answers + MIN_PROBE_ANSWERS)
        breaker.update(seen, now, chance)
    assert breaker.state is BreakerState.CLOSED


A, B, V = DrafterId("a"), DrafterId("b"), VerifierId("verifier-0")


def link(drafter_id: DrafterId, **evidence: float) -> AttachedDrafter:
    return AttachedDrafter(
        drafter_id=drafter_id,
        incarnation="1",
        methods=(DraftMethod.EAGLE3,),
        sessions=2,
        **evidence,  # type: ignore[arg-type]
    )


def test_each_verifier_judges_for_itself_and_only_those_who_are_known() -> None:
    quarantine = Quarantine(lambda: MIDDLE)
    here = replace(VERIFIER, verifier_id=V, drafters=(link(A, silent_ms=900.0), link(B)))
    there = replace(here, verifier_id=VerifierId("w"), drafters=(link(A), link(B)))
    assert quarantine.update(here, {A, B}, 0.0) == [(A, QuarantineReason.SILENT)]
    assert quarantine.update(there, {A, B}, 0.0) == []
    stranger = replace(here, drafters=(link(DrafterId("x"), silent_ms=900.0),))
    assert quarantine.update(stranger, {A, B}, 0.0) == []
    assert quarantine.get_breaker(V, DrafterId("x")) is None
    breaker = quarantine.get_breaker(V, A)
    assert breaker is not None and breaker.state is BreakerState.OPEN
    # A new connection of the same process does not heal; another process is another drafter.
    assert quarantine.update(replace(here, drafters=()), {A, B}, 0.5) == []
    assert quarantine.get_breaker(V, A) is breaker
    assert quarantine.update(here, {A, B}, 1.0) == [(A, None)]
    quarantine.forget_drafter(A)
    assert quarantine.get_breaker(V, A) is None


def test_a_restarted_verifier_begins_to_count_anew() -> None:
    breaker = CircuitBreaker()
    looks = [WELL, replace(WELL, answers=2, invalid=0), replace(WELL, answers=3, invalid=1)]
    assert judged(breaker, *looks) == [None] * 3
