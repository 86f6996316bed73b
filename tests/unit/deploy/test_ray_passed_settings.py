"""What the Ray launcher passes on to the configurations of its processes, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from outrider_ray import config as launcher
from outrider_ray import fixed_keys
from outrider_ray.config import RayFleetConfig, drafter_config, router_config, verifier_config

from outrider.config import load_config
from outrider.errors import InvalidRequestError

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
