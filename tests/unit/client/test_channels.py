"""A channel that broke is replaced, once, and closed when it can have no calls any more."""

from __future__ import annotations

import itertools

import pytest

from outrider.client.channels import MAX_OLD_CHANNELS, ChannelPool
from outrider.errors import CancelledRequestError, ConnectionLostError, UnavailableError

LOST = ConnectionLostError("gone", reason="PEER_LOST")


def numbered() -> ChannelPool[int]:
    return ChannelPool(itertools.count().__next__)


def test_only_a_lost_connection_replaces_the_channel() -> None:
    channels = numbered()
    assert channels.report_broken(0, UnavailableError("full", reason="NO_VERIFIER")) is None
    assert channels.current == 0
    assert channels.report_broken(0, LOST) is None
    assert channels.current == 1


def test_calls_that_break_together_replace_it_once() -> None:
    channels = numbered()
    for _ in range(5):
        channels.report_broken(0, LOST)
    assert channels.current == 1


def test_old_ones_are_closed_in_turn_and_none_is_forgotten() -> None:
    channels = numbered()
    closed = [channels.report_broken(channels.current, LOST) for _ in range(MAX_OLD_CHANNELS + 3)]
    assert closed == [None] * MAX_OLD_CHANNELS + [0, 1, 2]
    assert sorted(channels.take_all()) == list(range(3, MAX_OLD_CHANNELS + 4))


def test_none_is_given_out_once_all_were_taken() -> None:
    channels = numbered()
    used = channels.current
    assert channels.take_all() == [used]
    # Who was calling is not given another one, whatever the closed one said.
    for ask in (lambda: channels.current, lambda: channels.report_broken(used, LOST)):
        with pytest.raises(CancelledRequestError) as caught:
            ask()
        assert caught.value.reason == "CLIENT_CLOSED"
