"""Two routers of one fleet: a client resumes its stream at the one that does not have it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from outrider.client import AsyncClient, RetryPolicy, user
from outrider.client.commands.keys import format_key_table
from outrider.client.local.certificates import make_certificates, tls_from
from outrider.ids import RequestId
from outrider.transport.grpc.credentials import channel_credentials
from outrider.transport.tls import CertificateRole, TlsConfig, TlsFiles
from outrider.wire.inference import StreamPosition
from outrider.wire.inference_codec import position_to_pb
from outrider.wire.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.proxy import Proxy, proxied
from tests.integration.stack import Process, Stack, slow_rounds

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOKENS = 80
KEYS = {"alice": "sk-outrider-alice-s3cret", "bob": "sk-outrider-bob-s3cret"}
PATIENT = RetryPolicy(max_attempts=8)


@dataclass
class TwoRouters:
    """Routers with certificates and API keys. The first has a journal, and the second knows the
    first."""

    first: Process
    second: Process
    tls: TlsConfig
    """What clients trust, and their own certificate."""

    def client(self, address: str, name: str = "alice") -> AsyncClient:
        return AsyncClient(address, timeout_s=60.0, retry=PATIENT, tls=self.tls, api_key=KEYS[name])


@pytest.fixture(scope="module")
def routers(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoRouters]:
    directory = tmp_path_factory.mktemp("two-routers")
    certificates = directory / "tls"
    make_certificates(certificates)
    keys = directory / "keys.toml"
    keys.write_text("\n".join(format_key_table(name, key, {}) for name, key in KEYS.items()))
    own = tls_from(certificates, CertificateRole.ROUTER)
    with Stack(
        directory,
        model=str(tiny_target),
        head=str(tiny_head),
        verifier=slow_rounds(15),
        tls=certificates,
    ) as stack:
        flags = ["--model", str(tiny_target), "--verifier", stack.verifier.address]
        flags += ["--drafter", stack.drafter.address, "--api-keys", str(keys)]
        flags += ["--tls-client-auth", "--tls-cert", str(own.cert), "--tls-key", str(own.key)]
        flags += ["--tls-ca", str(own.ca)]

        def router(name: str, *more: str) -> Process:
            return Process(name, "outrider_router", [*flags, *more], directory / f"{name}.log")

        first = router("first", "--journal", str(directory / "journal"))
        second = first
        try:
            first.start().wait_ready()
            second = router("second", "--router", first.address)
            second.start().wait_ready()
            yield TwoRouters(first, second, tls_from(certificates, CertificateRole.CLIENT))
        finally:
            for process in (first, second):
                process.stop()


async def resumed_elsewhere(routers: TwoRouters, proxy: Proxy, lose_first: bool) -> list[int]:
    """Read a stream that begins at the first router and is resumed at the second one. Return its
    ids."""
    ids: list[int] = []
    async with routers.client(proxy.address) as client:
        stream = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        async for delta in stream:
            before = len(ids)
            ids += delta.token_ids
            if before < 20 <= len(ids):
                proxy.redirect(routers.second.address)
                if lose_first:
                    await asyncio.to_thread(routers.first.kill)
                proxy.cut()
                if lose_first:
                    # The second router answers meanwhile that the first may have the request.
                    await asyncio.sleep(1.0)
                    await asyncio.to_thread(routers.first.restart)
    return ids


@pytest.mark.parametrize("lose_first", [False, True])
async def test_a_stream_goes_on_through_another_router(
    routers: TwoRouters, lose_first: bool
) -> None:
    async with proxied(routers.first.address) as proxy:
        async with routers.client(routers.first.address) as client:
            calm = await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        assert await resumed_elsewhere(routers, proxy, lose_first) == list(calm.token_ids)


async def test_the_key_of_another_tenant_does_not_resume_a_stream(routers: TwoRouters) -> None:
    name = "req-of-alice"
    async with routers.client(routers.first.address) as alice:
        stream = alice.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, request_id=name)
        await anext(aiter(stream))
        credentials = channel_credentials(TlsFiles(routers.tls))
        position = position_to_pb(StreamPosition(request_id=RequestId(name)))
        async with grpc.aio.secure_channel(routers.second.address, credentials) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            codes = {}
            for owner, key in KEYS.items():
                call = stub.ResumeStream(
                    position, metadata=(("authorization", f"Bearer {key}"),), timeout=30.0
                )
                try:
                    await call.read()
                except grpc.aio.AioRpcError as error:
                    codes[owner] = error.code()
                call.cancel()
        assert codes == {"bob": grpc.StatusCode.NOT_FOUND}
        await stream.close()
