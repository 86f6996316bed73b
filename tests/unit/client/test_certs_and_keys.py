"""`outrider certs` and `outrider keys`: what they make is what the processes take."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from outrider_drafter.__main__ import parse_args as drafter_config
from outrider_router.__main__ import parse_args as router_config
from outrider_router.base.api_keys import KeysFile, find_key
from outrider_verifier.__main__ import parse_args as verifier_config

from outrider.client.commands import main
from outrider.client.commands.keys import append_table
from outrider.client.connection import call_metadata
from outrider.client.local.certificates import make_certificates, tls_from
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.process_flags import router_args
from outrider.client.local.readiness import check_hosts
from outrider.config import load_config
from outrider.errors import AlreadyExistsError, FailedPreconditionError, InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import CertificateRole, TlsFiles
from tests.unit.client.flags import drafter_arguments, verifier_arguments


def test_every_role_gets_a_certificate_whose_key_is_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    assert main.main(["certs", str(directory), "--host", "router.example"]) == 0
    for role in CertificateRole:
        TlsFiles(tls_from(directory, role).for_fleet())
    for path in directory.glob("*-key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_an_authority_is_never_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(AlreadyExistsError):
        make_certificates(tmp_path)
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_a_new_key_is_printed_once_and_its_hash_is_filed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    secrets = {}
    for name, flags in (
        ("alice", ["--tenant", "team", "--requests-per-s", "5", "--max-tokens", "100"]),
        ("boss", ["--operator", "--max-concurrent", "2"]),
    ):
        assert main.main(["keys", "new", name, "--file", str(path), *flags]) == 0
        secrets[name] = capsys.readouterr().out.strip()
    keys = load_config(KeysFile, path).keys
    for name, secret in secrets.items():
        assert find_key(keys, f"Bearer {secret}") == name
        assert secret not in path.read_text()
    assert (keys["alice"].tenant, keys["alice"].requests_per_s) == ("team", 5.0)
    assert keys["boss"].operator and not keys["alice"].operator
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main.main(["keys", "new", "alice", "--file", str(path)]) == 1
    assert main.main(["keys", "new", "no good"]) == 2


def test_the_local_runtime_gives_each_process_the_certificate_of_its_role(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (keys := tmp_path / "keys.toml").touch()
    config = LocalFleetConfig(
        model=tmp_path, methods=(DraftMethod.NGRAM,), tls_dir=tmp_path, api_keys=keys
    )
    assert verifier_config(verifier_arguments(config)).tls == tls_from(
        tmp_path, CertificateRole.VERIFIER
    )
    assert drafter_config(drafter_arguments(config)).tls == tls_from(
        tmp_path, CertificateRole.DRAFTER
    )
    router = router_config(router_args(config, ["a:1"], ["b:2"]))
    assert router.tls == router.client_tls == tls_from(tmp_path, CertificateRole.ROUTER)
    assert router.api_keys == keys


def test_clients_may_be_served_by_another_certificate(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path), "--verifier", "a:1"]
    fleet = ["--tls-cert", "a.pem", "--tls-key", "b.pem", "--tls-ca", "c.pem"]
    front = ["--client-api-tls-cert", "d.pem", "--client-api-tls-key", "e.pem"]
    config = router_config([*flags, *fleet, *front])
    assert config.client_tls.cert == Path("d.pem") and config.tls.cert == Path("a.pem")
    with pytest.raises(InvalidRequestError, match="mutual"):
        router_config([*flags, *fleet[:4]])


def test_a_key_comes_from_the_caller_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    assert call_metadata((("a", "b"),)) == (("a", "b"),)
    assert call_metadata((), api_key="k") == (("authorization", "Bearer k"),)
    monkeypatch.setenv("OUTRIDER_API_KEY", "from-there")
    assert call_metadata(()) == (("authorization", "Bearer from-there"),)
    assert call_metadata((), api_key="") == ()
    with pytest.raises(InvalidRequestError):
        call_metadata((), api_key="a\nb")


@pytest.mark.parametrize("tenant", ["größe 😀", 'a"b\\c', "\x7f\t\n"])
def test_any_text_of_a_key_is_read_back_by_the_router(tmp_path: Path, tenant: str) -> None:
    path = tmp_path / "keys.toml"
    assert main.main(["keys", "new", "alice", "--file", str(path), "--tenant", tenant]) == 0
    assert load_config(KeysFile, path).keys["alice"].tenant == tenant


@pytest.mark.parametrize(
    ("before", "said"),
    [
        # An argument that was no UTF-8: Python hands its bytes on as halves of pairs.
        (b"", "--tenant: half of a surrogate pair"),
        (b"[keys.alice", "Expected"),
        (b"keys = 3", "must be a table"),
        (b"keys = { bob = {} }", "no table can be added"),
        (b"\xff", "utf-8"),
    ],
)
def test_what_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: bytes, said: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(before)
    tenant = "team" if before else "\udcff"
    assert main.main(["keys", "new", "alice", "--file", str(path), "--tenant", tenant]) == 2
    assert said in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_key_of_this_name_is_found_however_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# [keys.bob]\n[keys.'alice']\nsha256 = ''\n")
    with pytest.raises(AlreadyExistsError):
        append_table(path, "alice", "")
    append_table(path, "bob", "[keys.bob]\n")
    assert path.read_text().endswith("\n[keys.bob]\n")


@pytest.mark.parametrize("flags", [{"listen": "10.9.8.7:0"}, {"http": "[fd00::1]:8000"}])
def test_a_host_that_is_not_in_the_certificate_is_said_before_anything_starts(
    tmp_path: Path, flags: dict[str, str]
) -> None:
    make_certificates(tmp_path)
    config = LocalFleetConfig(model=tmp_path, methods=(), tls_dir=tmp_path, **flags)
    cluster = LocalCluster(config)
    with pytest.raises(FailedPreconditionError, match=r"not for .*localhost.*--host") as caught:
        cluster.start()
    assert caught.value.reason == "WRONG_HOST" and not cluster.processes


def test_hosts_in_the_certificate_and_all_interfaces_are_served(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=["router.example", "10.9.8.7"])
    addresses = ("router.example:1", "10.9.8.7:1", "localhost:1", "[::1]:1", "0.0.0.0:1", "[::]:1")
    check_hosts(tmp_path, addresses)
