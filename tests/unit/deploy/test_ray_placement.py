"""Where the Ray launcher puts its actors, and on which devices they compute there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import ray
from outrider_ray.autoscale import AutoscaleConfig
from outrider_ray.cluster import init_options
from outrider_ray.config import (
    RayFleetConfig,
    drafter_config,
    router_config,
    verifier_config,
)
from outrider_ray.members import MemberRole
from outrider_ray.placement import actor_bundle, gpu_share, with_gpu_share

from outrider.errors import UnavailableError
from outrider.spec.plan import DraftMethod

HEAD = (DraftMethod.EAGLE3,)


def config_of(**values: object) -> RayFleetConfig:
    """Two actors that compute."""
    return RayFleetConfig(**({"model": "m", "head": "h", "methods": HEAD} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "gpus", "share"),
    [
        ("pack", [1.0], 0.5),
        ("pack", [2.0], 1.0),
        ("pack", [1.0, 1.0], 1.0),
        ("strict-pack", [1.0, 1.0], 0.5),
        ("strict-pack", [1.0, 2.0], 1.0),
        ("strict-spread", [1.0, 1.0], 1.0),
        ("strict-spread", [1.0], 1.0),
    ],
)
def test_two_actors_get_a_gpu_each_or_an_equal_share(
    strategy: str, gpus: list[float], share: float
) -> None:
    assert gpu_share(strategy, 2, gpus) == share


def test_a_cluster_without_gpus_is_named() -> None:
    with pytest.raises(UnavailableError, match="no GPU"):
        gpu_share("pack", 2, [0.0, 0.0])


def test_sharing_a_gpu_is_said_and_leaves_memory_for_the_drafter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    with caplog.at_level(logging.WARNING):
        config = with_gpu_share(config_of(device="cuda"))
    assert [record.message for record in caplog.records] == [
        "GPUs shared: there are fewer GPUs than actors"
    ]
    assert [actor_bundle(config, role) for role in config.roles] == [{"GPU": 0.5}, {"GPU": 0.5}]
    assert verifier_config(config).memory_fraction == 0.7
    own = config_of(device="cuda", gpus_per_actor=0.5, memory_fraction=0.4)
    assert verifier_config(own).memory_fraction == 0.4


def test_actors_with_a_gpu_each_compute_on_the_one_that_they_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = {"Alive": False, "Resources": {"GPU": 8.0}}
    alive = {"Alive": True, "Resources": {"GPU": 2.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [dead, alive])
    config = with_gpu_share(config_of(device="cuda", busy_polling_cores=3))
    verifier, drafter = verifier_config(config), drafter_config(config)
    assert drafter is not None
    assert (verifier.device, drafter.device) == ("cuda:0", "cuda:0")
    assert (verifier.busy_polling_cores, drafter.busy_polling_cores) == (3, 3)
    assert verifier.memory_fraction == 0.9
    assert [actor_bundle(config, role) for role in config.roles] == [{"GPU": 1.0}, {"GPU": 1.0}]


def test_a_drafter_that_only_looks_up_takes_no_gpu() -> None:
    config = config_of(device="cuda", methods=(DraftMethod.NGRAM,), busy_polling_cores=3)
    drafter = drafter_config(config)
    assert drafter is not None
    assert (drafter.device, drafter.busy_polling_cores) == ("cpu", 0)
    assert "GPU" not in actor_bundle(config, MemberRole.DRAFTER)
    assert actor_bundle(config, MemberRole.VERIFIER) == {"GPU": 1.0}


def test_every_member_of_a_pool_has_a_name_that_the_router_knows(tmp_path: Path) -> None:
    config = config_of(verifiers=2, drafters=3)
    router = router_config(config, tmp_path)
    assert router.verifiers == ("verifier-0", "verifier-1")
    assert router.drafters == ("drafter-0", "drafter-1", "drafter-2")
    assert verifier_config(config, 1).verifier_id == "verifier-1"
    own = drafter_config(config, 2)
    assert own is not None and own.drafter_id == "drafter-2"


def test_a_pool_that_drafts_by_its_verifiers_alone_has_no_drafters() -> None:
    config = config_of(verifiers=2, drafters=3, placement="fused")
    assert config.counts == (2, 0) and config.max_of == (2, 0)
    assert [len(cell) for cell in config.cells] == [1, 1]


def test_a_local_ray_has_room_for_all_that_may_come() -> None:
    config = config_of(
        drafters=2,
        cpus_per_actor=2.0,
        drafter_resource="near",
        autoscale=AutoscaleConfig(max_drafters=3),
    )
    options = init_options(config)
    assert options["num_cpus"] == 8
    assert options["resources"] == {"near": 3.0}


def test_what_reserves_nothing_still_has_a_bundle() -> None:
    config = config_of(verifier_resource="target_node")
    assert actor_bundle(config, MemberRole.VERIFIER) == {"target_node": 1.0}
    sliver = actor_bundle(config, MemberRole.DRAFTER)
    assert list(sliver) == ["CPU"] and 0.0 < sliver["CPU"] < 0.01


def test_object_refs_are_not_bypassed_by_shared_memory() -> None:
    for exchange, shm_channels in (("grpc", True), ("refs", False)):
        config = config_of(exchange=exchange)
        drafter = drafter_config(config)
        assert drafter is not None
        assert (verifier_config(config).shared_memory, drafter.shared_memory) == (
            shm_channels,
            shm_channels,
        )
        assert config.ray.exchange == exchange


def test_a_local_ray_listens_on_this_machine_alone() -> None:
    assert config_of().ray.listen_host == "127.0.0.1"
    assert config_of(ray_address="auto").ray.listen_host == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "tpu"),
        ("drafter_device", "cuda:1"),
        ("exchange", "carrier-pigeon"),
        ("strategy", "STRICT_PACK"),
        ("gpus_per_actor", -0.5),
        ("verifiers", 0),
        ("drafters", 0),
        ("detached", True),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        config_of(**{name: value})


def test_actors_on_cuda_without_any_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus_per_actor"):
        config_of(device="cuda", gpus_per_actor=0.0)
