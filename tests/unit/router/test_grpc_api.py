"""The router's port: health, reflection, and what does not belong there."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider_router.grpc_api import INFERENCE_SERVICE, inference_service
from outrider_router.service import RouterService

from outrider.ids import RequestId
from outrider.transport.grpc import GrpcServer
from outrider.wire.inference import (
    GenerateRequest,
    SamplingOptions,
    StoppingOptions,
    TextPrompt,
)
from outrider.wire.inference_codec import request_to_pb
from tests.fakes.router import eventually, grpc_router, running_router
from tests.fakes.verifier import FakeVerifier


@pytest.fixture
async def router(tmp_path: Path) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": FakeVerifier()}) as service:
        yield service


async def test_readiness_follows_the_verifiers(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    async with running_router(tmp_path, {"v": verifier}) as router:
        server = GrpcServer("127.0.0.1:0", [inference_service(router)])
        router.on_readiness = server.set_serving
        address = await server.start()

        async def status() -> int:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
                answer = await stub.Check(request)
            return int(answer.status)

        try:
            assert await status() == health_pb2.HealthCheckResponse.SERVING
            verifier.lost.set()
            await eventually(lambda: router.registry.any_info() is None)
            assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
            verifier.lost.clear()
            await eventually(lambda: router.registry.any_info() is not None)
            assert await status() == health_pb2.HealthCheckResponse.SERVING
        finally:
            await server.stop(0.0)


def mutated(rng: random.Random) -> bytes:
    """A valid request with some bytes changed, cut or repeated; or no request at all."""
    request = GenerateRequest(
        prompt=TextPrompt("abc"),
        request_id=RequestId("r"),
        sampling=SamplingOptions(temperature=0.5, seed=1, banned_token_ids=(1, 2)),
        stopping=StoppingOptions(max_tokens=3, stop=("x",)),
    )
    data = bytearray(request_to_pb(request).SerializeToString())
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(3):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at:]
            case _:
                data[at:at] = data[: rng.randrange(8)]
    return bytes(data) if rng.randrange(4) else rng.randbytes(rng.randrange(40))


async def test_malformed_requests_are_typed_errors_and_leave_nothing_behind(
    router: RouterService,
) -> None:
    rng = random.Random(0)
    seen = set()
    async with grpc_router(router) as address, grpc.aio.insecure_channel(address) as channel:
        for _ in range(300):
            data = mutated(rng)
            for name in ("Generate", "Abort"):
                seen.add(await outcome(channel, name, data))
        assert await outcome(channel, "ListModels", b"") == "OK"
    assert {"OK", "INVALID_ARGUMENT"} <= seen <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
    assert len(router.journal) == router.admission.running == 0


async def outcome(channel: grpc.aio.Channel, name: str, data: bytes) -> str:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    call = channel.unary_unary(f"/{INFERENCE_SERVICE}/{name}")
    try:
        await call(data, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
