"""What only the gRPC transport promises: health, reflection, statuses, dead and hostile peers."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InternalError,
    InvalidMessageError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.transport.grpc import (
    GrpcConfig,
    GrpcDialer,
    GrpcServer,
    GrpcService,
    drafter_services,
    verifier_services,
)
from outrider.transport.grpc.error_status import to_typed_error
from outrider.wire.codec import decode_sessions_message, encode_sessions_request
from outrider.wire.messages import SessionEvents, SessionFailure, SessionOpen
from outrider.wire.v1 import control_pb2, inference_pb2, inference_pb2_grpc
from tests.integration.fake_endpoints import FakeDrafter, FakeVerifier, proposal, spec
from tests.integration.transport_harness import HEARTBEAT
from tests.waiting import PATIENCE_S, soon

CONFIG = GrpcConfig(heartbeat=HEARTBEAT)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
VERIFIER = "outrider.wire.v1.VerifierService"


class Broken(inference_pb2_grpc.InferenceServiceServicer):
    """Fails in every way that a servicer can."""

    async def Generate(self, request: Any, context: Any) -> Any:
        raise ResourceExhaustedError("queue is full", reason="QUEUE_FULL", retry_after_s=0.25)

    async def GenerateStream(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        yield inference_pb2.GenerateStreamResponse(delta=inference_pb2.Delta(text="a"))
        raise RuntimeError("secret detail")


class Fleet:
    """A server with all services, and a channel to it."""

    def __init__(self) -> None:
        self.verifier = FakeVerifier()
        inference = GrpcService(
            name="outrider.wire.v1.InferenceService",
            register=partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Broken()),
        )
        services = [
            *verifier_services(self.verifier, CONFIG),
            *drafter_services(FakeDrafter()),
            inference,
        ]
        self.server = GrpcServer("127.0.0.1:0", services, config=CONFIG)
        self.dialer = GrpcDialer(CONFIG)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.dialer.channel(self.server.address)

    async def call(self, path: str, request: bytes) -> bytes:
        """A unary call with raw bytes, its failure as a typed error."""
        rpc: Any = self.channel.unary_unary(path)
        try:
            response: bytes = await rpc(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise to_typed_error(error) from None
        return response


@pytest.fixture
async def fleet() -> AsyncGenerator[Fleet]:
    made = Fleet()
    await made.server.start()
    yield made
    await made.dialer.close()
    await made.server.stop(0)


async def test_health_is_checked_by_service(fleet: Fleet) -> None:
    health = health_pb2_grpc.HealthStub(fleet.channel)
    for name in ("", VERIFIER, "outrider.wire.v1.InferenceService"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == SERVING
    fleet.server.set_serving(False)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    # For liveness probes: a server that serves nothing for now is alive.
    alive = health_pb2.HealthCheckRequest(service="grpc.health.v1.Health")
    assert (await health.Check(alive)).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_port_for_health_alone_says_what_the_other_port_says() -> None:
    server = GrpcServer("127.0.0.1:0", [], config=CONFIG, health_address="127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.health_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
            server.set_serving(False)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        second = GrpcServer("127.0.0.1:0", [], config=CONFIG, health_address=server.health_address)
        with pytest.raises(FailedPreconditionError, match=server.health_address):
            await second.start()
    finally:
        await server.stop(0)


async def test_every_watcher_hears_of_every_change(fleet: Fleet) -> None:
    health = health_pb2_grpc.HealthStub(fleet.channel)
    request = health_pb2.HealthCheckRequest(service=VERIFIER)
    first, second, leaver = (health.Watch(request) for _ in range(3))
    for watcher in (first, second, leaver):
        assert (await watcher.read()).status == SERVING
    leaver.cancel()
    await asyncio.sleep(0.05)
    fleet.server.set_serving(False)
    for watcher in (first, second):
        assert (await soon(watcher.read())).status == NOT_SERVING
        watcher.cancel()


async def test_a_stopping_server_says_so_before_it_stops() -> None:
    fleet = Fleet()
    await fleet.server.start()
    health = health_pb2_grpc.HealthStub(fleet.channel)
    watcher = health.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watcher.read()).status == SERVING
    stopping = asyncio.create_task(fleet.server.stop(PATIENCE_S))
    assert (await soon(watcher.read())).status == NOT_SERVING
    assert not stopping.done()
    watcher.cancel()
    await soon(stopping)
    await fleet.dialer.close()


async def test_reflection_lists_the_services_and_their_files(fleet: Fleet) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(fleet.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=VERIFIER),
    ]
    responses = [response async for response in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in responses[0].list_services_response.service}
    assert {
        VERIFIER,
        "outrider.wire.v1.ExchangeService",
        "outrider.wire.v1.DrafterService",
        "outrider.wire.v1.InferenceService",
        "grpc.health.v1.Health",
    } <= names
    assert responses[1].file_descriptor_response.file_descriptor_proto


METHODS = [
    f"/{VERIFIER}/SetPlan",
    f"/{VERIFIER}/CloseSession",
    "/outrider.wire.v1.DrafterService/Attach",
    "/outrider.wire.v1.DrafterService/Detach",
    "/outrider.wire.v1.DrafterService/Drain",
    "/outrider.wire.v1.InferenceService/Generate",
]


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_not_protobuf_are_invalid(fleet: Fleet, method: str) -> None:
    with pytest.raises(InvalidMessageError):
        await fleet.call(method, b"\xff\xff\xff")


async def test_a_malformed_opening_costs_its_own_session(fleet: Fleet) -> None:
    rpc: Any = fleet.channel.stream_stream(f"/{VERIFIER}/Sessions")
    call = rpc()
    await call.write(b"\xff\xff\xff")
    bad = control_pb2.SessionOpen(handle=7, spec=control_pb2.SessionSpec(session_id="s"))
    await call.write(control_pb2.SessionsRequest(open=bad).SerializeToString())
    answer = decode_sessions_message(await soon(call.read()))
    assert isinstance(answer, SessionFailure)
    assert (answer.handle, answer.kind) == (7, "InvalidMessageError")
    await call.write(encode_sessions_request(SessionOpen(8, spec("count", 1))))
    events = decode_sessions_message(await soon(call.read()))
    assert isinstance(events, SessionEvents)
    assert events.handles.tolist() == [8]
    call.cancel()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=100), min_size=1, max_size=20))
async def test_hostile_bytes_get_typed_errors_and_leave_the_server_well(
    fleet: Fleet, frames: list[bytes]
) -> None:
    for frame in frames:
        for method in METHODS:
            try:
                await fleet.call(method, frame)
            except OutriderError as error:
                assert not isinstance(error, InternalError | UnavailableError), method
    control = await fleet.dialer.verifier(fleet.server.address)
    assert (await control.info()).sessions == 0


async def test_a_generated_servicer_maps_its_errors(fleet: Fleet) -> None:
    make_stub: Any = inference_pb2_grpc.InferenceServiceStub
    stub = make_stub(fleet.channel)
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await stub.Generate(inference_pb2.GenerateRequest())
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = to_typed_error(full.value)
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 0.25)
    stream = stub.GenerateStream(inference_pb2.GenerateStreamRequest())
    assert (await stream.read()).delta.text == "a"
    with pytest.raises(grpc.aio.AioRpcError) as bug:
        await stream.read()
    assert bug.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (bug.value.details() or "")
    assert "secret" not in str(bug.value.trailing_metadata())


async def test_an_unknown_method_is_a_failed_precondition(fleet: Fleet) -> None:
    with pytest.raises(FailedPreconditionError):
        await fleet.call(f"/{VERIFIER}/Fly", b"")


async def test_an_oversized_frame_ends_its_exchange_and_nothing_else(fleet: Fleet) -> None:
    small = GrpcConfig(heartbeat=HEARTBEAT, max_message_bytes=1 << 20)
    server = GrpcServer("127.0.0.1:0", verifier_services(fleet.verifier, small), config=small)
    address = await server.start()
    connection: Any = await fleet.dialer.exchange(address)
    other = await fleet.dialer.exchange(address)
    await connection.inner.frames.send(bytes((1 << 20) + 100))
    with pytest.raises(OutriderError) as caught:
        await soon(connection.receive())
    assert isinstance(caught.value, ResourceExhaustedError | ConnectionLostError)
    await other.send(proposal(1))
    await soon(other.receive())
    await connection.close()
    await other.close()
    await server.stop(0)


async def test_an_address_in_use_is_refused(fleet: Fleet) -> None:
    second = GrpcServer(fleet.server.address, [], config=CONFIG)
    with pytest.raises(FailedPreconditionError, match="cannot listen on"):
        await second.start()


async def test_a_restarted_verifier_is_reached_again(fleet: Fleet) -> None:
    address = fleet.server.address
    control = await fleet.dialer.verifier(address)
    await control.info()
    await fleet.server.stop(0)
    with pytest.raises(UnavailableError):
        await control.info()
    fleet.server = GrpcServer(address, verifier_services(FakeVerifier(), CONFIG), config=CONFIG)
    await fleet.server.start()
    for _ in range(50):
        try:
            await control.info()
            return
        except UnavailableError:
            await asyncio.sleep(0.1)
    raise AssertionError("the channel did not come back within 5 s")


async def test_stopping_the_server_ends_exchanges_and_sessions(fleet: Fleet) -> None:
    connection = await fleet.dialer.exchange(fleet.server.address)
    control = await fleet.dialer.verifier(fleet.server.address)
    stream = control.open_session(spec("idle"))
    await anext(stream)
    await fleet.server.stop(0)
    with pytest.raises(OutriderError):
        await soon(connection.receive())
    with pytest.raises(OutriderError):
        await soon(anext(stream))
    await connection.close()
    assert fleet.verifier.exchanges == 0
    assert not fleet.verifier.sessions


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_lost_drafter_process_is_noticed(fleet: Fleet, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.fake_drafter_process",
        fleet.server.address,
        str(HEARTBEAT.interval_s),
        str(HEARTBEAT.timeout_s),
        stdout=PIPE,
    )
    assert process.stdout is not None
    assert (await asyncio.wait_for(process.stdout.readline(), 30)).strip() == b"attached"
    assert fleet.verifier.exchanges == 1
    process.send_signal(number)
    for _ in range(100):
        if fleet.verifier.exchanges == 0:
            break
        await asyncio.sleep(0.05)
    assert fleet.verifier.exchanges == 0, "the verifier did not notice within 5 s"
    if process.returncode is None:
        process.kill()
    await process.wait()


def test_settings_out_of_range_are_refused() -> None:
    for settings_ in (
        {"keepalive_time_s": 0.5},
        {"keepalive_timeout_s": 0.0},
        {"max_message_bytes": 1 << 40},
    ):
        with pytest.raises(ValueError, match=next(iter(settings_))):
            GrpcConfig(**settings_)
