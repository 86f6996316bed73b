"""The contract suite's view of the Ray transport: every endpoint is an actor."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import ray

from outrider.transport.interface import Dialer
from outrider.transport.ray import (
    REFS,
    RayConfig,
    RayDialer,
    RayEndpoint,
    serve_drafter,
    serve_verifier,
)
from tests.integration.fake_endpoints import FakeDrafter, FakeVerifier
from tests.integration.transport_harness import HEARTBEAT

ROOT = Path(__file__).parents[2]
# Streams over gRPC are the gRPC transport's, and have its tests.
CONFIG = RayConfig(exchange=REFS, heartbeat=HEARTBEAT)
_names = itertools.count()


@asynccontextmanager
async def fake_verifier(pid_file: str) -> AsyncGenerator[FakeVerifier]:
    await asyncio.to_thread(Path(pid_file).write_text, str(os.getpid()))
    yield FakeVerifier()


@asynccontextmanager
async def fake_drafter() -> AsyncGenerator[FakeDrafter]:
    yield FakeDrafter()


def start_ray() -> None:
    """One local instance, shared by all tests of the run."""
    if not ray.is_initialized():
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        ray.init(
            # Not one that another test has started.
            address="local",
            num_cpus=2,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            object_store_memory=256 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        )


class RayHarness:
    """Endpoints in actors; each is a process that may be killed."""

    separate = True

    def __init__(self) -> None:
        start_ray()
        self.dialer: Dialer = RayDialer(CONFIG)
        self._endpoints: list[RayEndpoint] = []
        self._directory = tempfile.TemporaryDirectory()

    def _pid_file(self, name: str) -> Path:
        return Path(self._directory.name) / name

    async def verifier(self) -> str:
        name = f"verifier-{next(_names)}"
        factory = partial(fake_verifier, str(self._pid_file(name)))
        self._endpoints.append(await serve_verifier(name, factory, config=CONFIG))
        return name

    async def drafter(self) -> str:
        name = f"drafter-{next(_names)}"
        self._endpoints.append(await serve_drafter(name, fake_drafter, config=CONFIG))
        return name

    async def mortal_verifier(self) -> str:
        return await self.verifier()

    async def kill(self, address: str) -> None:
        os.kill(int(self._pid_file(address).read_text()), signal.SIGKILL)

    async def freeze(self, address: str) -> None:
        os.kill(int(self._pid_file(address).read_text()), signal.SIGSTOP)

    async def close(self) -> None:
        await self.dialer.close()
        for endpoint in self._endpoints:
            await endpoint.stop()
        self._directory.cleanup()
