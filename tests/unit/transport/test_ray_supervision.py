"""An actor belongs to the last supervisor of its fleet that claimed it, and ends without one."""

from __future__ import annotations

import pytest

from outrider.errors import AlreadyExistsError, FailedPreconditionError
from outrider.transport.ray import SUPERVISOR_REPLACED, Supervision
from outrider.transport.ray.supervision import SupervisionState

FIRST = Supervision(fleet="a", orphan_timeout_s=10.0)
START_TIMEOUT_S = 100.0


def test_an_actor_waits_for_the_start_and_then_for_its_supervisor() -> None:
    state = SupervisionState(FIRST, START_TIMEOUT_S, now=0.0)
    assert not state.is_orphaned(109.0)
    assert state.is_orphaned(111.0)
    state.renew(FIRST.supervisor, now=20.0)
    assert not state.is_orphaned(30.0)
    assert state.is_orphaned(31.0)


def test_the_next_supervisor_of_the_fleet_takes_the_actor_from_the_first() -> None:
    state = SupervisionState(FIRST, START_TIMEOUT_S, now=0.0)
    following = Supervision(fleet="a", orphan_timeout_s=10.0)
    assert following.supervisor != FIRST.supervisor
    state.claim(following, now=500.0)
    assert not state.is_orphaned(509.0)
    with pytest.raises(FailedPreconditionError) as caught:
        state.renew(FIRST.supervisor, now=509.0)
    assert caught.value.reason == SUPERVISOR_REPLACED
    assert state.is_orphaned(511.0)


def test_a_supervisor_of_another_fleet_gets_nothing() -> None:
    state = SupervisionState(FIRST, START_TIMEOUT_S, now=0.0)
    with pytest.raises(AlreadyExistsError):
        state.claim(Supervision(fleet="b"), now=1.0)
    state.renew(FIRST.supervisor, now=2.0)


def test_without_a_timeout_an_actor_never_ends_by_itself() -> None:
    assert not SupervisionState(Supervision(), START_TIMEOUT_S, now=0.0).is_orphaned(1e9)
