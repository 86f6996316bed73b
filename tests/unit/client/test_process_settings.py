"""Settings of the processes, found before any of them is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.process_flags import plan_placement
from outrider.client.local.readiness import check_ports_free
from outrider.client.local.settings_check import ProcessSettings, check_settings, ray_warnings
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.spec.plan import DraftMethod


def settings_of(**values: Any) -> ProcessSettings:
    """Of a verifier, a drafter for n-grams and a router."""
    config = LocalFleetConfig(model=Path("/models/m"), methods=(DraftMethod.NGRAM,), **values)
    return check_settings(config, *plan_placement(config, 0))


def test_variables_that_flags_override_are_told_with_the_flag_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_ROUTER_MODEL_NAME", "mine")
    monkeypatch.setenv("OUTRIDER_ROUTER_DRAIN_TIMEOUT_S", "30")  # as it is anyway
    monkeypatch.setenv("OUTRIDER_ROUTER_DEFAULT_MAX_TOKENS", "7")  # counts
    monkeypatch.setenv("OUTRIDER_ROUTER_LISTEN", "0.0.0.0:1234")
    monkeypatch.setenv("OUTRIDER_VERIFIER_DTYPE", "fp8")
    monkeypatch.setenv("OUTRIDER_DRAFTER_DRAFTER_ID", "d")
    assert sorted(settings_of(model_name="m").warnings) == [
        "warning: OUTRIDER_DRAFTER_DRAFTER_ID is ignored: outrider serve sets drafter_id of the "
        "drafter",
        "warning: OUTRIDER_ROUTER_LISTEN is ignored: outrider serve sets listen of the router; "
        "use --host and --port",
        "warning: OUTRIDER_ROUTER_MODEL_NAME is ignored: outrider serve sets model_name of the "
        "router; use --served-model-name",
        "warning: OUTRIDER_VERIFIER_DTYPE is ignored: outrider serve sets dtype of the verifier; "
        "use --dtype",
    ]


def test_keys_of_a_file_that_flags_override_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "router.toml"
    file.write_text("drain_timeout_s = 5.0\nqueue_limit = 3\n")
    monkeypatch.setenv("OUTRIDER_ROUTER_CONFIG", str(file))
    (line,) = settings_of().warnings
    assert line == (
        f"warning: drain_timeout_s in {file} is ignored: "
        "outrider serve sets drain_timeout_s of the router; "
        "use --drain-timeout-s"
    )


def test_rays_launcher_is_told_of_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_RAY_MODEL", "other")
    (line,) = ray_warnings(["--model", "mine"])
    assert line.startswith("warning: OUTRIDER_RAY_MODEL is ignored")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OUTRIDER_ROUTER_QUEUE_LIMITS", "5", "unknown environment variable"),
        ("OUTRIDER_VERIFIER_MAX_WAITING", "many", "OUTRIDER_VERIFIER_MAX_WAITING: must be an int"),
        ("OUTRIDER_DRAFTER_DRAIN_TIMEOUT_S", "-1", "drain_timeout_s must not be negative"),
    ],
)
def test_variables_that_a_process_would_refuse_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequestError, match=says):
        settings_of()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys = [", "is not TOML"),
        ("[keys.a]\nsha = 'x'", "unknown configuration key keys.a.sha"),
        ("[keys.a]\nsha256 = 'x'", "sha256 must be 64 hexadecimal digits"),
    ],
)
def test_a_malformed_file_of_keys_is_found_before_anything_starts(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    cluster = LocalCluster(
        LocalFleetConfig(model=Path("/models/m"), methods=(), api_keys=file),
        progress=lambda _: None,
    )
    with pytest.raises(InvalidRequestError, match=says) as caught:
        cluster.start()
    assert str(file) in caught.value.message
    assert not cluster.members


def test_a_metrics_port_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = LocalCluster(
            LocalFleetConfig(model=Path("/models/m"), methods=(), metrics_port=port),
            progress=lambda _: None,
        )
        with pytest.raises(FailedPreconditionError, match=f"cannot listen on 127.0.0.1:{port}"):
            cluster.start()
    assert not cluster.members


def test_ports_of_the_environment_are_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ROUTER_POOL_LISTEN", "127.0.0.1:9001")
    monkeypatch.setenv("OUTRIDER_ROUTER_METRICS_HOST", "0.0.0.0")
    monkeypatch.setenv("OUTRIDER_VERIFIER_METRICS_PORT", "9300")
    found = settings_of(
        listen="127.0.0.1:9000",
        http="127.0.0.1:0",
        metrics_port=9100,
        routers=1,
        verifiers=2,
    )
    assert sorted(found.addresses) == [
        "0.0.0.0:9100",
        "127.0.0.1:9000",
        "127.0.0.1:9001",
        "127.0.0.1:9300",
        "127.0.0.1:9300",
    ]


def test_one_port_for_two_purposes_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"must be different addresses, both are 127\.0\.0\.1:8000"
    ):
        LocalFleetConfig(
            model=Path("m"), methods=(), listen="127.0.0.1:8000", http="127.0.0.1:8000"
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for first in (f"127.0.0.1:{port}", f"0.0.0.0:{port}"):
        with pytest.raises(FailedPreconditionError, match=f"{first} is asked for, too"):
            check_ports_free(first, None, f"127.0.0.1:{port}")
    check_ports_free("127.0.0.1:0", "127.0.0.1:0", f"127.0.0.1:{port}")
