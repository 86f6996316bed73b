"""Helpers of the transport contract suite."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from outrider.transport.interface import DrafterConnection
from outrider.wire.messages import SessionEvent, Verdict, Verdicts, VerifierInfo, VerifierMessage
from tests.integration.fake_endpoints import spec
from tests.integration.transport_harness import Harness

NOTICE_S = 20.0
"""Within this time a lost peer must have been noticed."""


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = NOTICE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.02)


async def next_verdict(connection: DrafterConnection) -> Verdict:
    message = await asyncio.wait_for(connection.receive(), 20)
    return only_verdict(message)


def only_verdict(message: VerifierMessage) -> Verdict:
    assert isinstance(message, Verdicts)
    (verdict,) = message.iter_verdicts()
    return verdict


async def tasks_at_rest() -> int:
    """Tasks of this loop once calls that have just ended are gone."""
    await asyncio.sleep(0.05)
    gc.collect()
    return len(asyncio.all_tasks())


def frames_of(connection: DrafterConnection) -> Any:
    below: Any = connection
    return below.inner.frames


class Peer:
    """A verifier, an exchange with it, and a view of its info."""

    def __init__(self, harness: Harness, address: str, connection: DrafterConnection) -> None:
        self.harness = harness
        self.address = address
        self.connection = connection

    async def info(self) -> VerifierInfo:
        control = await self.harness.dialer.verifier(self.address)
        return await control.info()

    async def exchanges(self) -> int:
        return len((await self.info()).drafters)


async def open_idle(peer: Peer) -> AsyncGenerator[SessionEvent]:
    control = await peer.harness.dialer.verifier(peer.address)
    stream = control.open_session(spec("idle"))
    assert isinstance(stream, AsyncGenerator)
    await anext(stream)
    return stream


async def no_sessions(peer: Peer) -> bool:
    return (await peer.info()).sessions == 0
