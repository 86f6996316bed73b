"""Running stacks and connected transports for the integration tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from outrider.client import Client, RetryPolicy
from tests.integration.contract_support import Peer
from tests.integration.stack import Stack
from tests.integration.transport_harness import GrpcHarness, Harness, InprocHarness


@pytest.fixture(scope="module")
def stack(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    arguments = ["--metrics-port", "0"]
    with Stack(directory, model=str(tiny_target), head=str(tiny_head), router=arguments) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    retry = RetryPolicy(max_attempts=1)
    with Client(stack.router.address, timeout_s=60.0, retry=retry) as connected:
        yield connected


@pytest.fixture
async def harness(transport_name: str) -> AsyncGenerator[Harness]:
    made: Harness
    match transport_name:
        case "inproc":
            made = InprocHarness()
        case "grpc":
            made = GrpcHarness()
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
