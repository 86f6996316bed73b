"""What the Ray launcher passes on to the configurations of its processes, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from outrider_ray import config as launcher
from outrider_ray import fixed_keys
from outrider_ray.__main__ import parse_args
from outrider_ray.config import RayFleetConfig, drafter_config, router_config, verifier_config

from outrider.config import load_config
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod

TEXT = """
model = "m"
threads = 2
[router.overload]
priority_aging_s = 3.0
[router.tenants.blue]
weight = 4.0
[verifier]
batch_wait_ms = 2
[drafter.ngram]
max_match = 6
"""


@pytest.fixture
def config(tmp_path: Path) -> RayFleetConfig:
    """A launcher's file with tables for its processes."""
    file = tmp_path / "ray.toml"
    file.write_text(TEXT)
    return load_config(RayFleetConfig, file, {"methods": ["ngram"]})


def test_further_keys_reach_the_processes_beside_what_the_launcher_decides(
    config: RayFleetConfig,
) -> None:
    router, verifier = router_config(config, Path("m")), verifier_config(config)
    drafter = drafter_config(config)
    assert drafter is not None
    assert (router.overload.priority_aging_s, router.tenants["blue"].weight) == (3.0, 4.0)
    assert (verifier.batch_wait_s, verifier.threads) == (0.002, 2)
    assert (drafter.ngram.max_match, drafter.ngram.min_match, drafter.threads) == (6, 2, 2)


def test_a_flag_of_the_launcher_wins_within_a_table_that_is_given() -> None:
    config = load_config(
        RayFleetConfig, None, {"model": "m", "look_ahead": 0, "router.speculation.top_k": 4}
    )
    speculation = router_config(config, Path("m")).speculation
    assert (speculation.look_ahead, speculation.top_k) == (0, 4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("verifier.listen", "0.0.0.0:1", "verifier.listen may not be given here"),
        ("drafter.drafter_id", "d", "drafter.drafter_id may not be given here"),
        ("router.verifiers", ["v:1"], "router.verifiers may not be given here"),
        ("verifier.batch_wait", 2, "did you mean verifier.batch_wait_ms"),
        ("router.overload.priority_aging", 2, "did you mean router.overload.priority_aging_s"),
        ("verifier.batch_wait_ms", "2", "verifier.batch_wait_ms must be float"),
    ],
)
def test_a_key_that_cannot_be_is_refused_at_the_start(key: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load_config(RayFleetConfig, None, {"model": "m", key: value})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("router.tls.ca", "/ca.pem", "router.client_api_tls"),
        ("verifier.tls.ca", "/ca.pem", "verifier.tls has no effect on Ray"),
        ("router.reuse_ports", True, "a fleet on Ray has one router"),
        ("member_metrics_port", 0, "must be -1, or 1 to 65534"),
        ("member_metrics_port", 65535, "for 1 actors of a role"),
    ],
)
def test_what_ray_has_no_counterpart_of_is_refused_by_name(
    key: str, value: object, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load_config(RayFleetConfig, None, {"model": "m", key: value})


def test_every_actor_has_a_metrics_port_of_its_own() -> None:
    config = RayFleetConfig(model="m", verifiers=2, drafters=2, member_metrics_port=9100)
    ports = [verifier_config(config, index).metrics_port for index in range(2)]
    drafters = [drafter_config(config, index) for index in range(2)]
    ports += [drafter.metrics_port for drafter in drafters if drafter is not None]
    assert ports == [9100, 9102, 9101, 9103]
    assert verifier_config(RayFleetConfig(model="m")).metrics_port == -1


def test_keys_and_the_certificate_of_clients_are_the_routers(tmp_path: Path) -> None:
    file = tmp_path / "ray.toml"
    file.write_text('[router.client_api_tls]\ncert = "/cert.pem"\nkey = "/key.pem"\n')
    flags = ["--model", "m", "--api-keys", "/keys.toml", "--batch-invariant"]
    config = parse_args([*flags, "--config", str(file)])
    router = router_config(config, Path("m"))
    assert router.api_keys == Path("/keys.toml")
    assert (router.client_tls.cert, router.tls.cert) == (Path("/cert.pem"), None)
    assert verifier_config(config).batch_invariant


def test_the_head_that_ships_for_a_model_is_used_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        launcher, "builtin_head", lambda model: Path("/heads/h") if model == "known" else None
    )
    config = RayFleetConfig(model="known")
    assert config.drafting == (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    assert verifier_config(config).feature_head == "/heads/h"
    for other in (RayFleetConfig(model="other"), RayFleetConfig(model="known", head="")):
        assert other.drafting == (DraftMethod.NGRAM,)


def test_what_the_launcher_decides_may_not_be_given_twice(
    config: RayFleetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Mapping[str, object]] = []

    def record(_: type, *, overrides: Mapping[str, object]) -> None:
        made.append(overrides)

    monkeypatch.setattr(launcher, "load_config", record)
    router_config(config, Path("m"))
    verifier_config(config)
    drafter_config(config)
    given = ({"overload", "tenants"}, {"batch_wait_ms"}, {"ngram"})
    tables = (fixed_keys.ROUTER, fixed_keys.VERIFIER, fixed_keys.DRAFTER)
    for overrides, but, own in zip(made, tables, given, strict=True):
        names = {name for name in overrides if "." not in name}
        assert names - own <= but and not own & but
