"""Handles are given lowest first, one to a session, and come back."""

from __future__ import annotations

import pytest
from outrider_verifier.state.session import Session, SessionHandles

from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import make_spec


def session(ticket: int) -> Session:
    kv = FakeTarget(num_blocks=8).pool.allocate(32)
    return Session.create(make_spec(), ticket=ticket, kv=kv, now=0.0, keeps_features=False)


def test_the_lowest_free_handle_is_the_next_one() -> None:
    handles, sessions = SessionHandles(4), [session(ticket) for ticket in range(6)]
    for each in sessions[:4]:
        handles.assign(each)
    assert [each.handle for each in sessions[:4]] == [0, 1, 2, 3]
    assert handles.get_owner(2) is sessions[2]
    for place in (3, 1):
        handles.release(sessions[place])
        assert sessions[place].handle == -1
    for each in sessions[4:]:
        handles.assign(each)
    assert [each.handle for each in sessions[4:]] == [1, 3]
    assert handles.get_owner(1) is sessions[4]


def test_nobody_owns_what_was_given_back_or_cleared() -> None:
    handles, first = SessionHandles(2), session(1)
    handles.assign(first)
    handles.clear()
    assert first.handle == -1
    with pytest.raises(AssertionError):
        handles.get_owner(0)
    second = session(2)
    handles.assign(second)
    assert second.handle == 0 and handles.get_owner(0) is second
