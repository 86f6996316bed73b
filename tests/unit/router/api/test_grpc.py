"""The router's port: health, reflection, and what does not belong there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider_router.api.inference_grpc import INFERENCE_SERVICE, inference_service
from outrider_router.base.tenants import TenantLimits, TenantSource
from outrider_router.config import OverloadConfig
from outrider_router.requests.service import RouterService

from outrider.errors import ResourceExhaustedError
from outrider.ids import RequestId
from outrider.transport.grpc import GrpcServer
from outrider.transport.grpc.error_status import to_typed_error
from outrider.wire.inference import GenerateRequest, SamplingOptions, StoppingOptions, TextPrompt
from outrider.wire.inference_codec import request_to_pb, stream_request_to_pb
from tests.fakes.router import grpc_router, running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.waiting import soon, until


@pytest.fixture
async def router(tmp_path: Path) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": FakeVerifier()}) as service:
        yield service


async def test_readiness_follows_the_verifiers(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    async with running_router(tmp_path, {"v": verifier}) as router:
        server = GrpcServer("127.0.0.1:0", [inference_service(router)])
        router.readiness.subscribe(server.set_serving)
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
            await until(lambda: router.registry.any_verifier_info() is None)
            assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
            verifier.lost.clear()
            await until(lambda: router.registry.any_verifier_info() is not None)
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
    assert len(router.running_requests) == router.admission.num_running == 0


async def test_the_tenant_is_told_by_metadata_and_refused_with_a_retry_delay(
    tmp_path: Path,
) -> None:
    settings = {
        "overload": OverloadConfig(tenant_from=TenantSource.METADATA),
        "tenants": {"slow": TenantLimits(requests_per_s=0.05)},
    }
    data = request_to_pb(GenerateRequest(prompt=TextPrompt("abc"))).SerializeToString()
    async with (
        running_router(tmp_path, {"v": FakeVerifier()}, **settings) as router,
        grpc_router(router) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        slow, fast = (("x-outrider-tenant", name) for name in ("slow", "fast"))
        assert await outcome(channel, "Generate", data, slow) == "OK"
        assert await outcome(channel, "Generate", data, fast) == "OK"
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        method = channel.unary_unary(f"/{INFERENCE_SERVICE}/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await method(data, metadata=(slow,), timeout=5)
        error = to_typed_error(raised.value)
        assert isinstance(error, ResourceExhaustedError) and error.reason == "RATE_LIMITED"
        assert error.retry_after_s is not None and 0.0 < error.retry_after_s <= 20.0
        assert sample(router, "outrider_tenant_requests_total", tenant="slow") == 1
        assert sample(router, "outrider_tenant_requests_total", tenant="default") == 1
        bad = "x-outrider-tenant", "x" * 100
        assert await outcome(channel, "Generate", data, bad) == "INVALID_ARGUMENT"


async def end_of(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> grpc.StatusCode:
    """The status of a stream that is read to its end."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def outcome(
    channel: grpc.aio.Channel, name: str, data: bytes, *metadata: tuple[str, str]
) -> str:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    call = channel.unary_unary(f"/{INFERENCE_SERVICE}/{name}")
    try:
        await call(data, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_a_stream_that_is_aborted_while_its_first_message_leaves_hears_of_its_end(
    router: RouterService,
) -> None:
    request = GenerateRequest(
        prompt=TextPrompt("abc"),
        request_id=RequestId("early"),
        stopping=StoppingOptions(max_tokens=1000),
        resumable=True,
    )
    async with grpc_router(router) as address, grpc.aio.insecure_channel(address) as channel:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        method = channel.unary_stream(f"/{INFERENCE_SERVICE}/GenerateStream")
        for pause_s in (0.0, 0.0, 0.001, 0.002):
            call = method(stream_request_to_pb(request).SerializeToString(), timeout=10)
            reading = asyncio.create_task(end_of(call))
            await until(lambda: len(router.running_requests) == 1)
            await asyncio.sleep(pause_s)
            assert router.abort_requests([RequestId("early")])
            assert await soon(reading) is grpc.StatusCode.CANCELLED
            await until(lambda: len(router.running_requests) == 0)
