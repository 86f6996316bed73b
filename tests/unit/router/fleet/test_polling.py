"""How long a peer may be silent before it is lost, and when it is looked at again."""

from __future__ import annotations

import asyncio
import time

import pytest
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import PeerStatus, poll_peer, wait_next_poll

from tests.waiting import soon


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_peer_that_does_not_answer_is_silent_for_the_whole_bound() -> None:
    peer = PeerStatus(address="a")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await poll_peer(peer, forever, 0.2)
    assert time.monotonic() - began >= 0.19
    assert peer.silent_s == pytest.approx(0.2)


async def test_time_in_which_this_process_stood_still_is_no_silence() -> None:
    peer = PeerStatus(address="a")

    async def answers_soon() -> None:
        await asyncio.sleep(0.05)

    async def stands_still() -> None:
        await asyncio.sleep(0.01)
        time.sleep(0.5)

    stall = asyncio.create_task(stands_still())
    await poll_peer(peer, answers_soon, 0.2)
    await stall
    assert peer.silent_s <= 0.1


async def test_an_error_of_the_look_is_raised_as_it_is() -> None:
    async def refused() -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await poll_peer(PeerStatus(address="a"), refused, 5.0)


async def test_a_lost_peer_is_looked_at_sooner_and_one_that_broke_at_once() -> None:
    peer = PeerStatus(address="a", state=PeerState.LOST)
    await soon(wait_next_poll(peer, 600.0))
    healthy = PeerStatus(address="b", state=PeerState.HEALTHY)
    healthy.woken.set()
    await soon(wait_next_poll(healthy, 600.0))
    assert healthy.silent_s == 0.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_next_poll(healthy, 5.0), 0.2)
