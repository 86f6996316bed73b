"""TLS settings: certificate files, the roles that certificates name, and the contexts of
servers."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from outrider.config import from_plain
from outrider.errors import FailedPreconditionError, InvalidRequestError, PermissionDeniedError
from outrider.transport.tls import (
    CertificateRole,
    RoleNames,
    TlsConfig,
    TlsFiles,
    check_host,
    server_context,
    uvicorn_tls,
)
from tests.fakes.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cert": "a.pem"}, "go together"),
        ({"key": "a.pem"}, "go together"),
        ({"cert": "a.pem", "key": "b.pem", "client_auth": True}, "client_auth needs"),
        ({"names": {"king": ["a"]}}, "names.king"),
        ({"names": {"router": [""]}}, "must not be empty"),
        ({"certs": "a.pem"}, "did you mean cert"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        from_plain(TlsConfig, values)


def test_between_processes_both_ends_need_all_three_files(tmp_path: Path) -> None:
    assert not TlsConfig().for_fleet().enabled
    with pytest.raises(InvalidRequestError, match="mutual"):
        TlsConfig(ca=tmp_path / "ca.pem").for_fleet()
    with pytest.raises(InvalidRequestError, match="mutual"):
        TlsConfig(cert=tmp_path / "a.pem", key=tmp_path / "b.pem").for_fleet()


def test_a_role_is_a_name_in_the_certificate() -> None:
    config = TlsConfig()
    for name in ("drafter.outrider.internal", "spiffe://outrider/role/drafter"):
        config.check_caller(["somewhere.example", name], [CertificateRole.DRAFTER])
        with pytest.raises(PermissionDeniedError, match="role router") as refused:
            config.check_caller([name], [CertificateRole.ROUTER])
        assert refused.value.reason == "WRONG_ROLE"
    with pytest.raises(PermissionDeniedError):
        config.check_caller([], [CertificateRole.ROUTER, CertificateRole.OPERATOR])


def test_names_of_a_role_can_be_given_and_then_count_alone() -> None:
    config = TlsConfig(
        names=RoleNames(router=("router.example", "spiffe://example/ns/a/sa/router"))
    )
    config.check_caller(["spiffe://example/ns/a/sa/router"], [CertificateRole.ROUTER])
    with pytest.raises(PermissionDeniedError):
        config.check_caller(["router.outrider.internal"], [CertificateRole.ROUTER])
    assert config.names_of(CertificateRole.ROUTER)[0] == "router.example"
    assert config.names_of(CertificateRole.DRAFTER)[0] == "drafter.outrider.internal"


def test_files_that_are_missing_or_no_good_say_which(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue("router")
    other = authority.issue("verifier")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for bad, said in (
        (TlsConfig(cert=tmp_path / "nowhere.pem", key=good.key, ca=good.ca), "nowhere.pem"),
        (TlsConfig(cert=good.cert, key=other.key, ca=good.ca), "verifier-key.pem"),
        (TlsConfig(cert=good.cert, key=junk, ca=good.ca), "junk.pem"),
        (TlsConfig(cert=good.cert, key=good.key, ca=junk), "junk.pem"),
        (TlsConfig(ca=tmp_path), str(tmp_path)),
    ):
        with pytest.raises(FailedPreconditionError, match=said) as refused:
            TlsFiles(bad)
        assert refused.value.reason == "BAD_TLS"


def test_a_changed_pair_is_taken_up_when_all_of_it_is_there(authority: Authority) -> None:
    config = authority.issue("router")
    assert config.cert is not None and config.key is not None
    files = TlsFiles(config)
    before = files.current_material()
    assert files.current_material() is before
    cert, key = config.cert.read_bytes(), config.key.read_bytes()
    authority.issue("router")
    new_cert, new_key = config.cert.read_bytes(), config.key.read_bytes()
    config.key.write_bytes(key)
    _touch(config.cert, 1)
    # Half of it: the old pair stands.
    assert files.current_material() == before and before.cert == cert
    config.key.write_bytes(new_key)
    _touch(config.key, 2)
    assert files.current_material().cert == new_cert
    config.cert.unlink()
    assert files.current_material().cert == new_cert


def test_other_servers_get_the_same_certificates(authority: Authority) -> None:
    config = authority.issue("router")
    assert uvicorn_tls(TlsConfig()) == {}
    assert uvicorn_tls(config) == {"ssl_certfile": str(config.cert), "ssl_keyfile": str(config.key)}
    strict = TlsConfig(cert=config.cert, key=config.key, ca=config.ca, client_auth=True)
    assert uvicorn_tls(strict)["ssl_cert_reqs"] is ssl.CERT_REQUIRED
    assert server_context(config, require_client=True).verify_mode is ssl.CERT_REQUIRED
    assert server_context(config, require_client=False).verify_mode is ssl.CERT_NONE


def test_a_host_is_looked_for_as_a_client_does(authority: Authority, tmp_path: Path) -> None:
    config = authority.issue("router", "router.example", "*.team.example", "10.0.0.1")
    for host in ("router.example", "a.team.example", "10.0.0.1"):
        check_host(config, host, "advice")
    for host in ("example", "a.b.team.example", "10.0.0.2", "::1"):
        with pytest.raises(FailedPreconditionError, match=r"router.example.*; advice") as caught:
            check_host(config, host, "advice")
        assert caught.value.reason == "WRONG_HOST"
    stranger = Authority(tmp_path / "other")
    with pytest.raises(FailedPreconditionError, match="unable to get") as caught:
        check_host(TlsConfig(cert=config.cert, key=config.key, ca=stranger.ca), "10.0.0.1", "")
    assert caught.value.reason == "BAD_TLS"


def _touch(path: Path, seconds: int) -> None:
    """Another modification time, however coarse the clock of the file system is."""
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime + seconds))
