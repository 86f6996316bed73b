"""The links of a chaos network do what they were told, and nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.chaos.faults import FaultKind
from outrider.chaos.frame_faults import FrameFaults
from outrider.chaos.network import ChaosNetwork
from outrider.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    NotFoundError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.wire.messages import SessionsLost
from tests.waiting import soon, until

HEARTBEAT = HeartbeatConfig(interval_s=0.05, timeout_s=0.3)


class Echo:
    """A verifier that tells what it received."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, ...]] = []
        self.over = asyncio.Event()
        self.ended: OutriderError | None = None

    async def exchange(self, connection: Any) -> None:
        try:
            while True:
                try:
                    message = await connection.receive()
                except ConnectionLostError:
                    raise
                except OutriderError:
                    self.heard.append((-1,))
                    continue
                assert isinstance(message, SessionsLost)
                self.heard.append(message.handles)
        except OutriderError as error:
            self.ended = error
            self.over.set()

    async def info(self) -> str:
        return "me"

    async def close_session(self, session_id: str) -> None:
        raise NotFoundError(f"no session {session_id}")


@asynccontextmanager
async def network() -> AsyncGenerator[tuple[ChaosNetwork, Echo]]:
    made, echo = ChaosNetwork(heartbeat=HEARTBEAT), Echo()
    made.serve_process("v", echo)
    before = len(asyncio.all_tasks())
    try:
        yield made, echo
    finally:
        await made.close()
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_good_link_carries_everything_in_order() -> None:
    async with network() as (net, echo):
        connection = await net.dialer("d").exchange("v")
        for handle in range(50):
            await connection.send(SessionsLost((handle,)))
        await until(lambda: len(echo.heard) == 50)
        assert echo.heard == [(handle,) for handle in range(50)]
        await connection.close()
        await soon(echo.over.wait())


@pytest.mark.parametrize("kind", [FaultKind.LOSE, FaultKind.DUPLICATE, FaultKind.REORDER])
async def test_a_mangling_link_does_what_it_is_named_for(kind: FaultKind) -> None:
    async with network() as (net, echo):
        connection = await net.dialer("d").exchange("v")
        way = net.direction("d", "v")
        way.mangling = FrameFaults(kind=kind, share=0.5, rng=random.Random(1))
        sent = [(handle,) for handle in range(40)]
        for handles in sent:
            await connection.send(SessionsLost(handles))
        await asyncio.sleep(0.05)
        way.mangling = FrameFaults(kind=kind, share=0.0, rng=random.Random(1))
        await connection.send(SessionsLost((99,)))
        await until(lambda: (99,) in echo.heard)
        heard = [handles for handles in echo.heard if handles != (99,)]
        assert heard != sent
        match kind:
            case FaultKind.LOSE:
                assert 0 < len(heard) < 40 and heard == sorted(heard)
            case FaultKind.DUPLICATE:
                assert sorted(set(heard)) == sent and len(heard) > 40
            case _:
                assert set(heard) <= set(sent) and len(heard) >= 39
        await connection.close()


async def test_changed_frames_cost_themselves() -> None:
    async with network() as (net, echo):
        connection = await net.dialer("d").exchange("v")
        way = net.direction("d", "v")
        way.mangling = FrameFaults(kind=FaultKind.TRUNCATE, share=1.0, rng=random.Random(2))
        for handle in range(20):
            await connection.send(SessionsLost((handle, 70000)))
        await asyncio.sleep(0.05)
        way.mangling = None
        await connection.send(SessionsLost((99,)))
        await until(lambda: (99,) in echo.heard)
        assert (-1,) in echo.heard
        assert echo.ended is None
        await connection.close()


async def test_a_blocked_link_holds_what_is_sent_and_is_noticed_by_its_silence() -> None:
    async with network() as (net, echo):
        connection = await net.dialer("d").exchange("v")
        way = net.direction("d", "v")
        way.block()
        await connection.send(SessionsLost((1,)))
        await asyncio.sleep(0.05)
        assert echo.heard == []
        way.unblock()
        await until(lambda: echo.heard == [(1,)])
        way.block()
        began = time.monotonic()
        await soon(echo.over.wait())
        assert time.monotonic() - began > 0.2
        assert isinstance(echo.ended, ConnectionLostError)
        way.unblock()
        await connection.close()


async def test_a_killed_process_reaches_nobody_and_is_reached_by_nobody() -> None:
    async with network() as (net, echo):
        dialer = net.dialer("d")
        control = await dialer.verifier("v")
        assert await control.info() == "me"
        with pytest.raises(NotFoundError):
            await control.close_session("s")
        connection = await dialer.exchange("v")
        net.kill("d")
        await soon(echo.over.wait())
        await connection.close()
        with pytest.raises(UnavailableError):
            await control.info()
        with pytest.raises(UnavailableError):
            await dialer.exchange("v")
        again = net.dialer("d")
        assert await (await again.verifier("v")).info() == "me"
        net.kill("v")
        with pytest.raises(UnavailableError):
            await (await again.verifier("v")).info()


async def test_calls_over_a_blocked_link_end_in_time() -> None:
    async with network() as (net, _):
        dialer = net.dialer("d")
        net.direction("v", "d").block()
        with pytest.raises(DeadlineExceededError):
            await (await dialer.verifier("v")).info()
        with pytest.raises(UnavailableError):
            await dialer.exchange("v")
