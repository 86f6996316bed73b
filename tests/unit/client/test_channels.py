"""A channel that broke is replaced, once, and closed when it can have no calls any more."""

from __future__ import annotations

import itertools

import pytest

from outrider.client.channels import MOST_OLD, Channels
from outrider.errors import CancelledRequestError, ConnectionLostError, UnavailableError

LOST = ConnectionLostError("gone", reason="PEER_LOST")


def numbered() -> Channels[int]:
    return Channels(itertools.count().__next__)


def test_only_a_lost_connection_replaces_the_channel() -> None:
    channels = numbered()
    assert channels.broke(0, UnavailableError("full", reason="NO_VERIFIER")) is None
    assert channels.current == 0
    assert channels.broke(0, LOST) is None
    assert channels.current == 1


def test_calls_that_break_together_replace_it_once() -> None:
    channels = numbered()
    for _ in range(5):
        channels.broke(0, LOST)
    assert channels.current == 1


def test_old_ones_are_closed_in_turn_and_none_is_forgotten() -> None:
    channels = numbered()
    closed = [channels.broke(channels.current, LOST) for _ in range(MOST_OLD + 3)]
    assert closed == [None] * MOST_OLD + [0, 1, 2]
    assert sorted(channels.take()) == list(range(3, MOST_OLD + 4))


def test_none_is_given_out_once_all_were_taken() -> None:
    channels = numbered()
    used = channels.current
    assert channels.take() == [used]
    # Who was calling is not given another one, whatever the closed one said.
    for ask in (lambda: channels.current, lambda: channels.broke(used, LOST)):
        with pytest.raises(CancelledRequestError) as caught:
            ask()
        assert caught.value.reason == "CLIENT_CLOSED"
