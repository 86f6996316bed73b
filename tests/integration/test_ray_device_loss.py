"""An actor whose device stops working ends by itself, and its keeper replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from outrider_ray.actor_keeper import ActorKeeper
from outrider_ray.actors import end_when

from outrider.errors import OutriderError
from outrider.transport.ray import RayDialer, serve_verifier
from tests.integration.fake_endpoints import FakeVerifier
from tests.integration.ray_harness import CONFIG, start_ray

NAME = "verifier-that-loses-its-device"
REPLACED_S = 90.0


@asynccontextmanager
async def losing(flag: str) -> AsyncGenerator[FakeVerifier]:
    """A verifier that loses its device when the flag is there; it takes the flag away."""
    lost = asyncio.Event()

    async def look() -> None:
        while not Path(flag).exists():
            await asyncio.sleep(0.05)
        Path(flag).unlink()
        lost.set()

    tasks = [asyncio.create_task(end_when(lost)), asyncio.create_task(look())]
    yield FakeVerifier()
    for task in tasks:
        task.cancel()


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    return tmp_path / "lost"


async def test_a_lost_devices_actor_is_replaced(flag: Path) -> None:
    start_ray()
    keeper = ActorKeeper(
        NAME, partial(serve_verifier, NAME, partial(losing, str(flag)), config=CONFIG)
    )
    dialer = RayDialer(CONFIG)
    try:
        await keeper.start()
        keeper.keep()
        control = await dialer.verifier(NAME)
        await control.info()
        assert keeper.where is not None
        # Ray keeps the name as long as somebody holds the actor's handle.
        first = keeper.where.pid
        await asyncio.to_thread(flag.touch)
        async with asyncio.timeout(REPLACED_S):
            while keeper.where is None or keeper.where.pid == first:
                await asyncio.sleep(0.1)
            while True:
                try:
                    await control.info()
                    break
                except OutriderError:
                    await asyncio.sleep(0.1)
    finally:
        await keeper.stop()
