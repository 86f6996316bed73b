"""Running stacks and connected transports for the integration tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from outrider_bench.quality.tool_model import make_tool_model

from outrider.client import Client
from tests.factories import make_target
from tests.integration.contract_support import Peer
from tests.integration.stack import Stack, connect
from tests.integration.transport_harness import GrpcHarness, Harness, InprocHarness


@pytest.fixture(scope="module")
def stack(survivor: Stack) -> Stack:
    return survivor


@pytest.fixture(scope="session")
def tool_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random target, with a chat template that renders tools and reasoning and a context that
    is long enough for them. A module serves it by a fixture `tiny_target` of its own."""
    target = make_target(tmp_path_factory.mktemp("target-of-tools"))
    directory = tmp_path_factory.mktemp("tools") / "tool-target"
    return make_tool_model(target, directory, max_model_len=16384)


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with connect(stack) as connected:
        yield connected


@pytest.fixture
async def harness(transport_name: str) -> AsyncGenerator[Harness]:
    made: Harness
    match transport_name:
        case "inproc":
            made = InprocHarness()
        case "grpc" | "shm":
            made = GrpcHarness(shm_channels=transport_name == "shm")
        case _:
            from tests.integration.ray_harness import RayHarness

            made = RayHarness()
    yield made
    await made.close()


@pytest.fixture
async def peer(harness: Harness) -> AsyncGenerator[Peer]:
    address = await harness.verifier()
    connection = await harness.dialer.exchange(address)
    yield Peer(harness, address, connection)
    await connection.close()
