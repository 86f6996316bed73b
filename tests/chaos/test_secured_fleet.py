"""With TLS and API keys on: no port answers a stranger, and whoever is refused is told and counted.

What a stranger may do to ports without either is in test_hostile_ports.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.client import (
    CancelledRequestError,
    Client,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    RetryPolicy,
    UnauthenticatedError,
    user,
)
from outrider.client.rpcs import RESUME_STREAM
from outrider.transport.tls import CertificateRole, TlsConfig
from outrider.wire.inference import StreamPosition
from tests.chaos.secured_fleet import (
    ALICE,
    BOB,
    BOSS,
    SECRETS,
    LockedFleet,
    listening_ports,
    make_fleet,
    secure_channel,
    write_keys,
)
from tests.fakes.certificates import Authority
from tests.waiting import wait_until

V1 = "outrider.wire.v1"
INFERENCE = [
    f"/{V1}.InferenceService/{name}"
    for name in ("Generate", "GenerateStream", "ResumeStream", "Abort", "GetServerInfo")
] + [f"/{V1}.InferenceService/ListModels", "/grpc.reflection.v1alpha.ServerReflection/X"]
METHODS = {
    "clients": (
        CertificateRole.ROUTER,
        f"/{V1}.InferenceService/GetServerInfo",
        CertificateRole.CLIENT,
    ),
    "pool": (CertificateRole.ROUTER, f"/{V1}.PoolService/AddDrafter", CertificateRole.OPERATOR),
    "verifier": (
        CertificateRole.VERIFIER,
        f"/{V1}.VerifierService/GetInfo",
        CertificateRole.ROUTER,
    ),
    "drafter": (CertificateRole.DRAFTER, f"/{V1}.DrafterService/GetInfo", CertificateRole.ROUTER),
}
"""By port: the server's role, a method, and whose certificate it is for."""
HEALTH = "/grpc.health.v1.Health/Check"
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
}
PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9")]
HTTP_PATHS = ("/", "/v1/models", "/metrics", "/version", "/openapi.json", "/tokenize", "/nothing")


@pytest.fixture(scope="module")
def fleet(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LockedFleet]:
    made = make_fleet(tmp_path_factory.mktemp("locked"), str(tiny_target), str(tiny_head))
    with made.stack:
        yield made


def call(channel: grpc.Channel, path: str, data: bytes = b"", key: str = "") -> bytes:
    """A call with raw bytes and, perhaps, a key."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    return method(data, timeout=30.0, metadata=metadata)


def code_of(channel: grpc.Channel, path: str, data: bytes = b"", key: str = "") -> grpc.StatusCode:
    try:
        call(channel, path, data, key)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def once(fleet: LockedFleet, key: str) -> Client:
    ca = TlsConfig(ca=fleet.certificates / "ca.pem")
    retry = RetryPolicy(max_attempts=1)
    return Client(fleet.stack.router.address, tls=ca, api_key=key, retry=retry)


def check_unharmed(fleet: LockedFleet) -> None:
    """All three live, drafts cross the wire and change no text."""
    assert all(process.alive for process in fleet.processes)
    with fleet.stack.client() as client:
        drafted = client.generate(PROMPT, max_tokens=16, temperature=0.0)
        plain = client.generate(PROMPT, max_tokens=16, temperature=0.0, drafter="none")
        assert drafted.token_ids == plain.token_ids


def test_a_scan_finds_the_known_ports_alone_and_none_answers_plain_text(
    fleet: LockedFleet,
) -> None:
    known = {**fleet.grpc_ports, **fleet.http_ports}
    found = set[int]().union(*map(listening_ports, fleet.processes))
    assert found == {int(address.rpartition(":")[2]) for address in known.values()}
    for address in known.values():
        with grpc.insecure_channel(address) as channel:
            for path in (HEALTH, *INFERENCE):
                assert code_of(channel, path) is grpc.StatusCode.UNAVAILABLE, address
        for path in ("/", "/health", "/metrics", "/v1/models"):
            with pytest.raises(OSError):
                urllib.request.urlopen(f"http://{address}{path}", timeout=30.0)
    check_unharmed(fleet)


def test_without_a_key_nothing_but_health_answers_clients(fleet: LockedFleet) -> None:
    address = fleet.grpc_ports["clients"]
    before = {r: fleet.metric(fleet.stack.router, "outrider_access_refusals_total", reason=r)
              for r in ("NO_KEY", "WRONG_KEY")}  # fmt: skip
    with fleet.channel(address, None, CertificateRole.ROUTER) as channel:
        assert code_of(channel, HEALTH) is grpc.StatusCode.OK
        for path in INFERENCE:
            assert code_of(channel, path) is grpc.StatusCode.UNAUTHENTICATED
            assert code_of(channel, path, key=ALICE + "x") is grpc.StatusCode.UNAUTHENTICATED
        assert code_of(channel, METHODS["clients"][1], key=ALICE) is grpc.StatusCode.OK
    http = fleet.http_ports["http"]
    assert fleet.get(http, "/health") == 200
    for path in HTTP_PATHS:
        assert fleet.get(http, path) == fleet.get(http, path, "sk-wrong") == 401
    assert fleet.get(http, "/v1/models", ALICE) == 200
    assert (fleet.get(http, "/metrics", ALICE), fleet.get(http, "/metrics", BOSS)) == (403, 200)
    for reason, count in before.items():
        after = fleet.metric(fleet.stack.router, "outrider_access_refusals_total", reason=reason)
        assert after - count == len(INFERENCE) + len(HTTP_PATHS)
    with once(fleet, "sk-wrong") as client, pytest.raises(UnauthenticatedError) as refused:
        client.server_info()
    assert refused.value.reason == "WRONG_KEY"


@pytest.mark.parametrize("port", [name for name in METHODS if name != "clients"])
def test_a_port_of_the_fleet_is_for_one_role_of_its_own_authority(
    fleet: LockedFleet, port: str, tmp_path: Path
) -> None:
    server, method, role = METHODS[port]
    address = fleet.grpc_ports[port]
    process = next(each for each in fleet.processes if each.name == server)
    handshakes = fleet.metric(process, "outrider_tls_handshakes_total")
    refusals = fleet.metric(process, "outrider_access_refusals_total", reason="WRONG_ROLE")
    stranger = Authority(tmp_path).issue(role)
    assert stranger.key is not None and stranger.cert is not None
    pair = stranger.key.read_bytes(), stranger.cert.read_bytes()
    with secure_channel(address, fleet.ca, *pair, server) as other_authority:
        assert code_of(other_authority, method, key=BOSS) is grpc.StatusCode.UNAVAILABLE
    with fleet.channel(address, None, server) as nobody:
        assert code_of(nobody, method, key=BOSS) is grpc.StatusCode.UNAVAILABLE
        assert code_of(nobody, HEALTH) is grpc.StatusCode.UNAVAILABLE
    wrong_roles = [each for each in CertificateRole if each is not role]
    for wrong in wrong_roles:
        with fleet.channel(address, wrong, server) as channel:
            assert code_of(channel, method, key=BOSS) is grpc.StatusCode.PERMISSION_DENIED
    after = fleet.metric(process, "outrider_access_refusals_total", reason="WRONG_ROLE")
    assert after - refusals == len(wrong_roles)
    begun = fleet.metric(process, "outrider_tls_handshakes_total")
    assert begun - handshakes >= 2 + len(wrong_roles)


def test_the_exchange_is_for_drafters_alone(fleet: LockedFleet) -> None:
    with fleet.channel(
        fleet.grpc_ports["verifier"], CertificateRole.ROUTER, CertificateRole.VERIFIER
    ) as channel:
        rpc = channel.stream_stream(f"/{V1}.ExchangeService/Exchange")(iter(()), timeout=30.0)
        with pytest.raises(grpc.RpcError) as refused:
            next(rpc)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_the_pool_wants_an_operators_certificate_and_key(fleet: LockedFleet) -> None:
    address, method = fleet.grpc_ports["pool"], METHODS["pool"][1]
    with fleet.channel(address, CertificateRole.OPERATOR, CertificateRole.ROUTER) as channel:
        assert code_of(channel, method) is grpc.StatusCode.UNAUTHENTICATED
        assert code_of(channel, method, key=ALICE) is grpc.StatusCode.PERMISSION_DENIED
        assert code_of(channel, method, key=BOSS) is grpc.StatusCode.INVALID_ARGUMENT


def test_metrics_are_for_operators(fleet: LockedFleet) -> None:
    for process in fleet.processes:
        address = process.ready["metrics"]
        assert fleet.get(address, "/metrics", BOSS, CertificateRole.OPERATOR) == 200
        for role in (None, CertificateRole.VERIFIER):
            with pytest.raises(OSError):
                fleet.get(address, "/metrics", BOSS, role)
    address = fleet.stack.router.ready["metrics"]
    assert fleet.get(address, "/metrics", "", CertificateRole.OPERATOR) == 401
    assert fleet.get(address, "/metrics", ALICE, CertificateRole.OPERATOR) == 403


@pytest.mark.parametrize("port", list(METHODS))
def test_malformed_and_oversized_messages_of_friends_are_refused(
    fleet: LockedFleet, port: str
) -> None:
    server, method, role = METHODS[port]
    with fleet.channel(fleet.grpc_ports[port], role, server) as channel:
        for data in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f"):
            code = code_of(channel, method, data, key=BOSS)
            # A message without fields may be anything: it is not looked at.
            ignores = method.endswith("/GetInfo")
            assert code in REFUSED or (ignores and code is grpc.StatusCode.OK)
        oversized = code_of(channel, method, bytes(80 << 20), key=BOSS)
        assert oversized is grpc.StatusCode.RESOURCE_EXHAUSTED
        long = (("x-long", "a" * (32 << 10)),)
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(method)(b"", timeout=30.0, metadata=long)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    check_unharmed(fleet)


def test_garbage_and_silence_before_any_handshake_cost_themselves(fleet: LockedFleet) -> None:
    """Whatever is said before a handshake: every port still serves, meanwhile and afterwards."""
    addresses = [*fleet.grpc_ports.values(), *fleet.http_ports.values()]
    with contextlib.ExitStack() as stack:
        for address in addresses:
            host, _, port = address.rpartition(":")
            for data in (secrets.token_bytes(4096), b"\x16\x03\x01\xff\xff", b"GET / HTTP/1.1\r\n"):
                sock = stack.enter_context(socket.create_connection((host, int(port)), 30.0))
                with contextlib.suppress(OSError):
                    sock.sendall(data)
            stack.enter_context(socket.create_connection((host, int(port)), 30.0))
        assert fleet.get(fleet.http_ports["http"], "/health") == 200
        for process in fleet.processes:
            fleet.metric(process, "up")
        check_unharmed(fleet)


def test_http_bounds_bodies_and_says_what_is_wrong(fleet: LockedFleet) -> None:
    address = fleet.http_ports["http"]

    def post(data: bytes, key: str) -> int:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        request = urllib.request.Request(
            f"https://{address}/v1/completions", data=data, headers=headers
        )
        try:
            context = fleet.context(None)
            with urllib.request.urlopen(request, timeout=30.0, context=context) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert post(b'{"prompt": "a", "max_tokens": 4}', ALICE) == 200
    assert post(b'{"prompt": ', ALICE) == 400
    assert post(b'{"prompt": "a", "max_tokens": 9}', BOB) == 400
    assert post(b'{"prompt": "a", "max_tokens": 8}', BOB) == 200
    assert post(b'{"prompt": "a"}', "sk-wrong") == 401


def test_old_tls_is_not_spoken(fleet: LockedFleet) -> None:
    for address in (*fleet.grpc_ports.values(), *fleet.http_ports.values()):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 30.0) as sock,
            pytest.raises(OSError),
        ):
            context.wrap_socket(sock)


def test_nobody_resumes_or_aborts_what_another_tenant_asked_for(fleet: LockedFleet) -> None:
    with once(fleet, ALICE) as alice, once(fleet, BOB) as bob:
        stream = alice.stream(
            PROMPT, max_tokens=2000, ignore_eos=True, drafter="none", request_id="of-alice"
        )
        next(stream)
        assert bob.abort(["of-alice"]) == ()
        position = RESUME_STREAM.encode(StreamPosition(request_id="of-alice"))
        with fleet.channel(fleet.grpc_ports["clients"], None, CertificateRole.ROUTER) as channel:
            method = channel.unary_stream(RESUME_STREAM.path)
            as_bob = (("authorization", f"Bearer {BOB}"),)
            with pytest.raises(grpc.RpcError) as refused:
                next(method(position, timeout=30.0, metadata=as_bob))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert alice.abort(["of-alice"]) == ("of-alice",)
        with pytest.raises((CancelledRequestError, NotFoundError)):
            stream.result()


def test_a_keys_limits_are_told_as_errors_and_counted(fleet: LockedFleet) -> None:
    router = fleet.stack.router
    with once(fleet, BOB) as bob, once(fleet, ALICE) as alice:
        with pytest.raises(InvalidRequestError, match="at most 8") as long:
            bob.generate(PROMPT, max_tokens=9)
        assert long.value.reason == "KEY_MAX_TOKENS"
        write_keys(
            fleet.directory / "keys.toml", bob={"max_concurrent": 1}, boss={"operator": True}
        )
        os.kill(router.pid, signal.SIGHUP)
        wait_until(lambda: answers(bob, max_tokens=9), timeout_s=30.0, what="keys read again")
        before = fleet.metric(router, "outrider_refusals_total", reason="KEY_BUSY")
        with bob.stream(PROMPT, max_tokens=2000, ignore_eos=True, drafter="none") as stream:
            next(stream)
            with pytest.raises(ResourceExhaustedError) as busy:
                bob.generate(PROMPT, max_tokens=1)
            assert busy.value.reason == "KEY_BUSY" and busy.value.retry_after_s
            alice.generate(PROMPT, max_tokens=1)
        assert fleet.metric(router, "outrider_refusals_total", reason="KEY_BUSY") == before + 1
        wait_until(lambda: answers(bob, max_tokens=1), timeout_s=30.0, what="a place of bob's")


def answers(client: Client, *, max_tokens: int) -> bool:
    with contextlib.suppress(InvalidRequestError, ResourceExhaustedError):
        client.generate(PROMPT, max_tokens=max_tokens)
        return True
    return False


def test_no_secret_is_in_any_log(fleet: LockedFleet) -> None:
    """All that the other tests did was logged at DEBUG."""
    check_unharmed(fleet)
    wrong = [*SECRETS.values(), "sk-wrong", "Bearer ", "Count: 0 1"]
    private = [
        line
        for path in fleet.certificates.glob("*-key.pem")
        for line in path.read_text().splitlines()[1:-1]
    ]
    for process in fleet.processes:
        log = (fleet.directory / f"{process.name}.log").read_text()
        assert '"level": "debug"' in log
        assert not [secret for secret in (*wrong, *private) if secret in log]


def test_many_at_the_wrong_door_do_not_keep_friends_out(fleet: LockedFleet) -> None:
    address = fleet.grpc_ports["clients"]

    def knock() -> None:
        with fleet.channel(address, None, CertificateRole.ROUTER) as channel:
            for _ in range(50):
                assert code_of(channel, INFERENCE[0]) is grpc.StatusCode.UNAUTHENTICATED

    threads = [threading.Thread(target=knock) for _ in range(4)]
    for thread in threads:
        thread.start()
    check_unharmed(fleet)
    for thread in threads:
        thread.join()
