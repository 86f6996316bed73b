"""Running stacks and connected transports for the integration tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

import pytest

from outrider.client import Client
from tests.integration.contract_support import Peer
from tests.integration.stack import Stack, connect
from tests.integration.transport_harness import GrpcHarness, Harness, InprocHarness


@pytest.fixture(scope="module")
def stack(survivor: Stack) -> Stack:
    return survivor


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
