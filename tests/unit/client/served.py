"""A served router for tests of commands that talk to one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import grpc_router, running_router
from tests.fakes.verifier import FakeVerifier


class Served:
    """A router on a fake verifier, in a thread with an event loop of its own. `config`: settings of
    the router."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self._config = config
        self.verifier: FakeVerifier | None = None
        self.address = ""
        self.directory = directory
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.verifier = FakeVerifier(tokens_per_round=3)
        drafter = FakeDrafter({"v": self.verifier})
        async with (
            running_router(
                self.directory, {"v": self.verifier}, {"d": drafter}, **self._config
            ) as router,
            grpc_router(router) as self.address,
        ):
            self._ready.set()
            await self._stop.wait()
