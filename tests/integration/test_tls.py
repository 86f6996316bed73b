"""TLS over gRPC: who gets through to which service, and certificates that are replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import (
    OutriderError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.transport.grpc import (
    AccessRules,
    GrpcConfig,
    GrpcDialer,
    GrpcServer,
    drafter_services,
    verifier_services,
)
from outrider.transport.grpc.access import Metadata
from outrider.transport.grpc.error_status import to_typed_error
from outrider.transport.tls import CertificateRole, TlsConfig
from tests.fakes.certificates import Authority
from tests.integration.fake_endpoints import FakeDrafter, FakeVerifier

CONFIG = GrpcConfig(connect_timeout_s=10.0, control_timeout_s=10.0)
GET_INFO = "/outrider.wire.v1.VerifierService/GetInfo"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@asynccontextmanager
async def verifier(access: AccessRules) -> AsyncGenerator[str]:
    """A verifier's port; its address."""
    services = verifier_services(FakeVerifier(), CONFIG)
    server = GrpcServer("127.0.0.1:0", services, config=CONFIG, access=access)
    try:
        yield await server.start()
    finally:
        await server.stop(0)


@asynccontextmanager
async def dialer(tls: TlsConfig | None) -> AsyncGenerator[GrpcDialer]:
    made = GrpcDialer(CONFIG, tls=tls)
    try:
        yield made
    finally:
        await made.close()


async def info(address: str, tls: TlsConfig | None) -> None:
    async with dialer(tls) as made:
        await (await made.verifier(address)).info()


async def test_each_service_is_for_its_own_role(authority: Authority) -> None:
    refused: Counter[str] = Counter()
    access = AccessRules(
        tls=authority.role(CertificateRole.VERIFIER), on_refused=lambda r: refused.update([r])
    )
    async with verifier(access) as address:
        await info(address, authority.issue("router"))
        async with dialer(authority.issue("drafter")) as as_drafter:
            connection = await as_drafter.exchange(address)
            await connection.close()
            control = await as_drafter.verifier(address)
            with pytest.raises(PermissionDeniedError, match="role router"):
                await control.info()
            with pytest.raises(PermissionDeniedError, match="role router"):
                await control.sessions()
        async with dialer(authority.issue("router")) as as_router:
            with pytest.raises(PermissionDeniedError, match="role drafter"):
                await as_router.exchange(address)
    assert refused == {"WRONG_ROLE": 3}


async def test_no_certificate_and_one_of_another_authority_get_nothing(
    authority: Authority, tmp_path: Path
) -> None:
    handshakes: list[None] = []
    access = AccessRules(
        tls=authority.role(CertificateRole.VERIFIER), on_handshake=lambda: handshakes.append(None)
    )
    stranger = Authority(tmp_path / "other").issue("router")
    believes = TlsConfig(cert=stranger.cert, key=stranger.key, ca=authority.ca)
    async with verifier(access) as address:
        for tls in (None, TlsConfig(ca=authority.ca), believes, stranger):
            with pytest.raises(UnavailableError):
                await info(address, tls)
        assert len(handshakes) >= 4
        await info(address, authority.issue("router"))


async def test_a_dialer_refuses_a_server_of_the_wrong_role(authority: Authority) -> None:
    """A drafter's certificate serves nobody as a verifier."""
    async with verifier(AccessRules(tls=authority.role(CertificateRole.DRAFTER))) as address:
        with pytest.raises(UnavailableError, match="not in peer certificate"):
            await info(address, authority.issue("router"))


async def test_a_drafter_takes_orders_from_a_router_alone(authority: Authority) -> None:
    access = AccessRules(tls=authority.role(CertificateRole.DRAFTER))
    server = GrpcServer("127.0.0.1:0", drafter_services(FakeDrafter()), access=access)
    address = await server.start()
    try:
        async with dialer(authority.issue("router")) as as_router:
            await (await as_router.drafter(address)).attach("127.0.0.1:1")
        async with dialer(authority.issue("verifier")) as as_verifier:
            with pytest.raises(PermissionDeniedError):
                await (await as_verifier.drafter(address)).attach("127.0.0.1:1")
    finally:
        await server.stop(0)


async def test_a_replaced_certificate_serves_new_connections_without_a_restart(
    tmp_path: Path,
) -> None:
    before = Authority(tmp_path / "a")
    server = before.role(CertificateRole.VERIFIER)
    assert server.cert is not None and server.key is not None and server.ca is not None
    after = Authority(tmp_path / "b")
    async with verifier(AccessRules(tls=server)) as address:
        await info(address, before.issue("router"))
        renewed = after.role(CertificateRole.VERIFIER)
        for old, new in zip((server.cert, server.key, server.ca), _files(renewed), strict=True):
            old.write_bytes(new.read_bytes())
        await info(address, after.issue("router"))
        old_router = before.issue("router")
        believes = TlsConfig(cert=old_router.cert, key=old_router.key, ca=after.ca)
        with pytest.raises(UnavailableError):
            await info(address, believes)


async def test_whoever_dials_takes_up_certificates_that_were_replaced(tmp_path: Path) -> None:
    """A control client goes on with the new ones: those that it began with may be over by then."""
    before, after = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    own = before.issue("router")
    async with dialer(own) as made:
        async with verifier(AccessRules(tls=before.role(CertificateRole.VERIFIER))) as address:
            control = await made.verifier(address)
            await control.info()
        for old, new in zip(_files(own), _files(after.issue("router")), strict=True):
            old.write_bytes(new.read_bytes())
        services = verifier_services(FakeVerifier(), CONFIG)
        access = AccessRules(tls=after.role(CertificateRole.VERIFIER))
        server = GrpcServer(address, services, config=CONFIG, access=access)
        await server.start()
        try:
            await control.info()
        finally:
            await server.stop(0)


async def test_a_channel_with_a_replaced_certificate_is_closed_after_its_last_stream(
    authority: Authority,
) -> None:
    own, other = authority.issue("router"), authority.issue("renewed", "router.outrider.internal")
    access = AccessRules(tls=authority.role(CertificateRole.VERIFIER))
    async with verifier(access) as address, dialer(own) as made:
        control = await made.verifier(address)
        sessions = await control.sessions()
        old = made.channel(address)
        for file, new in zip(_files(own), _files(other), strict=True):
            file.write_bytes(new.read_bytes())
        await control.info()
        assert made.channel(address) is not old
        assert old.get_state() is not grpc.ChannelConnectivity.SHUTDOWN, "a stream runs on it"
        await sessions.close()
        async with asyncio.timeout(30.0):
            while old.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0.01)
        assert made.num_retired_channels == 0
        await control.info()


async def test_a_stream_of_responses_goes_on_when_the_certificate_is_replaced(
    authority: Authority,
) -> None:
    own, other = authority.issue("router"), authority.issue("renewed", "router.outrider.internal")
    access = AccessRules(tls=authority.role(CertificateRole.VERIFIER))
    async with verifier(access) as address, dialer(own) as made:
        watch = made.server_stream(
            address,
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest().SerializeToString(),
            role=CertificateRole.VERIFIER,
        )
        assert isinstance(await watch.read(), bytes)
        for file, new in zip(_files(own), _files(other), strict=True):
            file.write_bytes(new.read_bytes())
        await (await made.verifier(address)).info()
        made.retire_channels()
        await (await made.verifier(address)).info()
        await asyncio.sleep(0.1)
        assert not watch.done() and made.num_retired_channels == 1
        watch.cancel()
        async with asyncio.timeout(30.0):
            while made.num_retired_channels:
                await asyncio.sleep(0.01)


def _files(config: TlsConfig) -> tuple[Path, ...]:
    assert config.cert is not None and config.key is not None and config.ca is not None
    return config.cert, config.key, config.ca


def only_friends(metadata: Metadata) -> None:
    if ("authorization", "friend") not in tuple(metadata):
        raise UnauthenticatedError("who are you?", reason="NO_KEY")


async def _call(channel: grpc.aio.Channel, path: str, data: bytes, **options: Any) -> bytes:
    try:
        answer: bytes = await channel.unary_unary(path)(data, timeout=10.0, **options)
    except grpc.aio.AioRpcError as error:
        raise to_typed_error(error) from None
    return answer


async def test_without_credentials_nothing_but_health_answers() -> None:
    access = AccessRules(check=only_friends)
    friend = (("authorization", "friend"),)
    async with verifier(access) as address, dialer(None) as made:
        channel = made.channel(address)
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(health_pb2.HealthCheckRequest())).status == 1
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        for path in (GET_INFO, "/outrider.wire.v1.VerifierService/Nothing", "/a.B/C", reflection):
            with pytest.raises(UnauthenticatedError, match="who are you") as caught:
                await _call(channel, path, b"")
            assert caught.value.reason == "NO_KEY"
        assert await _call(channel, GET_INFO, b"", metadata=friend)


async def test_the_message_of_an_unknown_caller_is_not_even_read() -> None:
    """One beyond every bound is refused for who sent it, not for its size."""
    options = [("grpc.max_send_message_length", -1)]
    async with (
        verifier(AccessRules(check=only_friends)) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        with pytest.raises(UnauthenticatedError):
            await _call(channel, GET_INFO, bytes(80 << 20))
        with pytest.raises(OutriderError) as caught:
            friend = (("authorization", "friend"),)
            await _call(channel, GET_INFO, bytes(80 << 20), metadata=friend)
        assert caught.value.code == "RESOURCE_EXHAUSTED"


async def test_connections_and_headers_beyond_their_bounds_are_refused() -> None:
    config = GrpcConfig(max_connections=2)
    server = GrpcServer("127.0.0.1:0", verifier_services(FakeVerifier()), config=config)
    address = await server.start()
    host, _, port = address.partition(":")
    open_ones = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    try:
        # gRPC's server speaks first: whom it takes hears its settings.
        for reader, _writer in open_ones:
            assert await asyncio.wait_for(reader.read(9), 30.0)
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(9), 30.0) == b""
        writer.close()
    finally:
        for _reader, writer in open_ones:
            writer.close()
        await server.stop(0)
    async with verifier(AccessRules()) as address, dialer(None) as made:
        with pytest.raises(OutriderError) as caught:
            long = (("x-long", "a" * (20 << 10)),)
            await _call(made.channel(address), GET_INFO, b"", metadata=long)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
