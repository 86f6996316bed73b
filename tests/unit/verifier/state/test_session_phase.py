"""A session is in one phase, and enters only those that may follow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import (
    ALLOWED_TRANSITIONS,
    DECODING,
    ENDED,
    PREFILLING,
    SWAPPED,
    WAITING,
    SessionPhase,
)

from outrider.errors import InternalError
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import make_spec

PROMPT = (3, 1, 4, 1, 5)


def waiting() -> Session:
    kv = FakeTarget(num_blocks=8).pool.new_sequence()
    spec = make_spec(prompt=PROMPT)
    return Session.create(spec, ticket=1, kv=kv, now=1.0, keeps_features=False)


def prefilling() -> Session:
    session = waiting()
    session.mark_admitted(2.0, kept=False)
    return session


def decoding() -> Session:
    session = prefilling()
    session.mark_submitted(len(PROMPT))
    session.commit_tokens((7,), 2.5)
    return session


def swapped() -> Session:
    session = decoding()
    session.mark_preempted(3.0, swapped=True)
    return session


def ended() -> Session:
    session = decoding()
    session.mark_ended()
    return session


IN_PHASE: dict[SessionPhase, Callable[[], Session]] = {
    WAITING: waiting,
    SWAPPED: swapped,
    PREFILLING: prefilling,
    DECODING: decoding,
    ENDED: ended,
}


def test_the_table_names_every_phase() -> None:
    assert set(ALLOWED_TRANSITIONS) == set(IN_PHASE) == set(SessionPhase)


@pytest.mark.parametrize("after", SessionPhase)
@pytest.mark.parametrize("before", SessionPhase)
def test_a_session_enters_the_phases_of_the_table_and_no_other(
    before: SessionPhase, after: SessionPhase
) -> None:
    session = IN_PHASE[before]()
    assert session.phase is before
    if after in ALLOWED_TRANSITIONS[before]:
        session.change_phase(after)
        assert session.phase is after
        return
    with pytest.raises(InternalError, match=f"is {before.value} and cannot become {after.value}"):
        session.change_phase(after)
    assert session.phase is before


def test_a_session_waits_until_it_is_admitted_and_decodes_when_its_prompt_was_submitted() -> None:
    session = waiting()
    assert session.is_waiting and session.waited_s(1.75) == 0.75
    session.mark_admitted(2.0, kept=False, found=2)
    assert (session.phase, session.prefill_left) == (PREFILLING, 3)
    session.mark_submitted(4)
    assert (session.phase, session.prefill_left) == (PREFILLING, 1)
    session.mark_submitted(5)
    assert (session.phase, session.prefill_left) == (DECODING, 0)
    assert not session.is_waiting and session.waited_s(9.0) == 1.0
    assert session.preemption.count == 0 and session.preemption.resumed_at == 0.0


@pytest.mark.parametrize("swapped", [True, False])
def test_a_preempted_session_goes_on_where_it_was_or_prefills_again(swapped: bool) -> None:
    session = decoding()
    session.mark_preempted(4.0, swapped=swapped)
    assert session.phase is (SWAPPED if swapped else WAITING) and session.is_waiting
    assert session.waited_s(4.5) == 1.5
    session.mark_admitted(5.0, kept=swapped)
    assert session.phase is (DECODING if swapped else PREFILLING)
    # The root is known: all but its KV is computed again.
    assert session.prefill_left == (0 if swapped else len(PROMPT))
    record = session.preemption
    assert (record.count, record.total_wait_s) == (1, 2.0)
    assert (record.resumed_at, record.resumed_len) == (5.0, len(PROMPT) + 1)


def test_a_session_swapped_in_the_middle_of_its_prompt_prefills_the_rest() -> None:
    session = prefilling()
    session.mark_submitted(3)
    session.mark_preempted(3.0, swapped=True)
    session.mark_admitted(4.0, kept=True)
    assert session.phase is PREFILLING and session.prefill_left == 2


def test_a_session_that_finds_all_it_had_written_decodes_at_once() -> None:
    session = decoding()
    session.mark_preempted(3.0, swapped=False)
    session.mark_admitted(4.0, kept=False, found=len(PROMPT))
    assert session.phase is DECODING


def test_prefilling_again_for_a_draft_is_no_preemption() -> None:
    session = decoding()
    session.mark_recomputing(3.0)
    session.mark_admitted(3.0, kept=False)
    assert session.phase is PREFILLING and session.prefill_left == len(PROMPT)
    assert session.preemption.count == 0 and session.preemption.total_wait_s == 1.0
    assert session.preemption.resumed_at == 3.0


@pytest.mark.parametrize("made", [waiting, decoding, swapped, ended])
def test_only_a_session_that_prefills_has_tokens_submitted(made: Callable[[], Session]) -> None:
    session = made()
    with pytest.raises(AssertionError):
        session.mark_submitted(len(PROMPT))


@pytest.mark.parametrize("made", [prefilling, decoding, ended])
def test_only_a_session_that_waits_is_admitted(made: Callable[[], Session]) -> None:
    session = made()
    with pytest.raises(AssertionError):
        session.mark_admitted(9.0, kept=False)


def test_a_session_that_was_preempted_before_its_first_token_keeps_its_cached_tokens() -> None:
    session = waiting()
    assert session.cached_tokens is None
    session.mark_admitted(2.0, kept=False, found=2)
    session.mark_preempted(3.0, swapped=False)
    session.mark_admitted(4.0, kept=False, found=4)
    assert session.cached_tokens == 2 and session.prefill.left == 1
