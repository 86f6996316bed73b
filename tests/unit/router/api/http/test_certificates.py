"""The HTTP front behind TLS: who is admitted, and a certificate that is replaced while it
serves."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest
from outrider_router.api.http import HttpServer, server
from outrider_router.config import HttpConfig

from outrider.transport.tls import CertificateRole, TlsConfig
from tests.fakes.certificates import Authority
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier


async def shown_to(address: str, ca: Path) -> bytes:
    """The certificate that a port shows to whoever believes this authority."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(ca))
    _reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    told: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return told


async def test_a_replaced_certificate_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_CHECK_S", 0.02)
    authority = Authority(tmp_path / "tls")
    tls = authority.role(CertificateRole.ROUTER)
    verifiers = {"v": FakeVerifier()}
    async with running_router(tmp_path / "model", verifiers, client_api_tls=tls) as service:
        http = HttpServer("127.0.0.1:0", service)
        address = await http.start()
        try:
            before = await shown_to(address, authority.ca)
            assert await shown_to(address, authority.ca) == before
            authority.role(CertificateRole.ROUTER)
            async with asyncio.timeout(30.0):
                while await shown_to(address, authority.ca) == before:
                    await asyncio.sleep(0.02)
        finally:
            await http.stop()


async def test_clients_without_a_certificate_are_refused_where_one_is_asked_for(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "tls")
    own = authority.role(CertificateRole.ROUTER)
    tls = TlsConfig(cert=own.cert, key=own.key, ca=own.ca, client_auth=True)
    verifiers = {"v": FakeVerifier()}
    async with running_router(tmp_path / "model", verifiers, client_api_tls=tls) as service:
        http = HttpServer("127.0.0.1:0", service)
        host, _, port = (await http.start()).rpartition(":")
        context = ssl.create_default_context(cafile=str(authority.ca))
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            # In TLS 1.3 a server says no after the client thinks that it is through.
            with pytest.raises((ssl.SSLError, ConnectionError)):
                assert not await asyncio.wait_for(reader.read(), 30.0)
                raise ConnectionError("closed without a word")
            writer.close()
            client = authority.issue("client")
            assert client.cert is not None
            context.load_cert_chain(client.cert, client.key)
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 30.0)
            writer.close()
        finally:
            await http.stop()


async def test_connections_are_counted_and_timed_before_their_handshake(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "tls").role(CertificateRole.ROUTER)
    options = HttpConfig(max_connections=3, handshake_s=0.5, head_s=0.5)
    verifiers = {"v": FakeVerifier()}
    async with running_router(
        tmp_path / "model", verifiers, client_api_tls=tls, http_options=options
    ) as service:
        http = HttpServer("127.0.0.1:0", service)
        address = await http.start()
        host, _, port = address.rpartition(":")

        async def closed_after_s(reader: asyncio.StreamReader) -> float:
            begun = asyncio.get_running_loop().time()
            with contextlib.suppress(ConnectionError):
                assert not await asyncio.wait_for(reader.read(), 30.0)
            return asyncio.get_running_loop().time() - begun

        silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        try:
            assert tls.ca is not None
            for _ in range(3):
                await shown_to(address, tls.ca)
            # The first one made room at once, the last one had its time.
            first, *_, last = await asyncio.gather(*(closed_after_s(each) for each, _ in silent))
            assert first < last < 5.0
            await shown_to(address, tls.ca)
        finally:
            for _, writer in silent:
                writer.close()
            await http.stop()
