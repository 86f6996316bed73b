"""`outrider certs` and `outrider keys`: what they make is what the processes take."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from outrider_drafter.__main__ import parse_args as drafter_config
from outrider_router.__main__ import parse_args as router_config
from outrider_router.keys import KeysFile, find_key
from outrider_verifier.__main__ import parse_args as verifier_config

from outrider.client import cli
from outrider.client.certs_command import make_certificates, tls_from
from outrider.client.connecting import call_metadata
from outrider.client.local import LocalConfig, drafter_args, router_args, verifier_args
from outrider.config import load_config
from outrider.errors import AlreadyExistsError, InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import Role, TlsFiles


def test_every_role_gets_a_certificate_whose_key_is_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    assert cli.main(["certs", str(directory), "--host", "router.example"]) == 0
    for role in Role:
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
        assert cli.main(["keys", "new", name, "--file", str(path), *flags]) == 0
        secrets[name] = capsys.readouterr().out.strip()
    keys = load_config(KeysFile, path).keys
    for name, secret in secrets.items():
        assert find_key(keys, f"Bearer {secret}") == name
        assert secret not in path.read_text()
    assert (keys["alice"].tenant, keys["alice"].requests_per_s) == ("team", 5.0)
    assert keys["boss"].operator and not keys["alice"].operator
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cli.main(["keys", "new", "alice", "--file", str(path)]) == 1
    assert cli.main(["keys", "new", "no good"]) == 2


def test_the_local_runtime_gives_each_process_the_certificate_of_its_role(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    keys = tmp_path / "keys.toml"
    config = LocalConfig(
        model=tmp_path, methods=(DraftMethod.NGRAM,), tls_dir=tmp_path, api_keys=keys
    )
    assert verifier_config(verifier_args(config)).tls == tls_from(tmp_path, Role.VERIFIER)
    assert drafter_config(drafter_args(config)).tls == tls_from(tmp_path, Role.DRAFTER)
    router = router_config(router_args(config, "a:1", "b:2"))
    assert router.tls == router.client_tls == tls_from(tmp_path, Role.ROUTER)
    assert router.api_keys == keys


def test_clients_may_be_served_by_another_certificate(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path), "--verifier", "a:1"]
    fleet = ["--tls-cert", "a.pem", "--tls-key", "b.pem", "--tls-ca", "c.pem"]
    front = ["--front-tls-cert", "d.pem", "--front-tls-key", "e.pem"]
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
