"""Which devices the processes of one machine compute on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.client.local import cluster as local_cluster
from outrider.client.local import process_flags
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.process_flags import (
    ProcessPlacement,
    count_gpus,
    plan_placement,
    router_args,
)
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.spec.plan import DraftMethod
from tests.unit.client.flags import drafter_arguments, flags_of, verifier_arguments

CUDA = LocalFleetConfig(model=Path("m"), head=Path("h"), device="cuda", cuda_graphs=False)


def of(verifiers: int, drafters: int) -> LocalFleetConfig:
    return replace(CUDA, verifiers=verifiers, drafters=drafters)


def test_processes_have_a_gpu_each_where_there_are_as_many() -> None:
    verifiers, drafters = plan_placement(of(3, 1), 4)
    assert verifiers == [ProcessPlacement(f"verifier-{i}", f"cuda:{i}") for i in range(3)]
    assert drafters == [ProcessPlacement("drafter-0", "cuda:3")]


def test_a_verifier_leaves_memory_to_those_on_its_gpu_alone() -> None:
    verifiers, drafters = plan_placement(of(2, 2), 2)
    assert verifiers == [
        ProcessPlacement("verifier-0", "cuda:0", 0.7, shares_gpu=True),
        ProcessPlacement("verifier-1", "cuda:1", 0.7, shares_gpu=True),
    ]
    assert drafters == [
        ProcessPlacement("drafter-0", "cuda:0", shares_gpu=True),
        ProcessPlacement("drafter-1", "cuda:1", shares_gpu=True),
    ]


def test_verifiers_on_one_gpu_must_be_told_what_to_hold() -> None:
    plain = replace(of(3, 1), methods=())
    with pytest.raises(
        InvalidRequestError,
        match="3 verifiers share 2 GPUs: set the KV cache size of each with --kv-tokens",
    ):
        plan_placement(plain, 2)
    verifiers, _ = plan_placement(replace(plain, kv_tokens=4096), 2)
    assert verifiers == [ProcessPlacement(f"verifier-{i}", f"cuda:{i % 2}") for i in range(3)]


def test_drafters_may_be_sent_elsewhere() -> None:
    verifiers, drafters = plan_placement(replace(of(1, 2), drafter_device="cpu"), 1)
    assert verifiers == [ProcessPlacement("verifier-0", "cuda:0")]
    assert drafters == [ProcessPlacement("drafter-0", "cpu"), ProcessPlacement("drafter-1", "cpu")]
    verifiers, _ = plan_placement(replace(of(1, 1), drafter_device="cuda:0"), 2)
    assert verifiers == [ProcessPlacement("verifier-0", "cuda:0", 0.7, shares_gpu=True)]


@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        ({}, 2, None),
        # On one GPU a process that waits would keep it from the other.
        ({}, 1, "off"),
        ({"device_exchange": "on"}, 1, "on"),
        ({"device_exchange": "off"}, 2, "off"),
        ({"device_exchange": "on", "placement": "fused"}, 1, None),
    ],
)
def test_a_pair_exchanges_between_gpus_of_their_own(
    given: dict[str, Any], gpus: int, said: str | None
) -> None:
    config = replace(of(1, 1), **given)
    assert flags_of(verifier_arguments(config, gpus=gpus)).get("device-exchange") == said
    if config.drafter_methods and config.placement == "separate":
        assert flags_of(drafter_arguments(config, gpus=gpus)).get("device-exchange") == said


def test_another_word_for_the_exchange_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one of auto, on, off, got 'yes'"):
        replace(CUDA, device_exchange="yes")


def test_without_gpus_all_compute_on_cpus() -> None:
    verifiers, drafters = plan_placement(replace(of(2, 1), device="cpu"), 0)
    assert verifiers == [ProcessPlacement("verifier-0"), ProcessPlacement("verifier-1")]
    assert drafters == [ProcessPlacement("drafter-0")]


def test_flags_say_the_place_and_half_the_bits() -> None:
    verifier = verifier_arguments(CUDA, gpus=1)
    flags = flags_of(verifier)
    assert (flags["verifier-id"], flags["device"]) == ("verifier-0", "cuda:0")
    assert (flags["dtype"], flags["memory-fraction"]) == ("bfloat16", "0.7")
    assert "--no-cuda-graphs" in verifier and "--kv-tokens" not in verifier
    assert "--memory-fraction" not in verifier_arguments(CUDA, gpus=2)
    drafter = drafter_arguments(CUDA, gpus=2)
    assert (flags_of(drafter)["drafter-id"], flags_of(drafter)["device"]) == ("drafter-0", "cuda:1")
    assert "--no-cuda-graphs" in drafter


def test_the_router_is_told_of_everybody() -> None:
    config = LocalFleetConfig(model=Path("m"), methods=(DraftMethod.NGRAM,))
    args = router_args(config, ["a:1", "b:2"], ["c:3"])
    assert args[:6] == ["--verifier", "a:1", "--verifier", "b:2", "--drafter", "c:3"]


def test_several_routers_share_their_ports_and_have_metrics_of_their_own() -> None:
    config = LocalFleetConfig(model=Path("m"), methods=(), routers=2, metrics_port=9100)
    first, second = (router_args(config, ["a:1"], [], index) for index in range(2))
    assert "--reuse-ports" in first and "--reuse-ports" in second
    ports = [args[args.index("--metrics-port") + 1] for args in (first, second)]
    assert ports == ["9100", "9101"]
    free = replace(config, metrics_port=0)
    assert router_args(free, ["a:1"], [], 1)[-1] == "0"
    assert "--reuse-ports" not in router_args(replace(config, routers=1), ["a:1"], [])


@pytest.mark.parametrize("flags", [{"journal": Path("log")}, {"http": "127.0.0.1:0"}])
def test_what_several_routers_cannot_have_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LocalFleetConfig(model=Path("m"), methods=(), routers=2, **flags)
    assert caught.value.reason == "INVALID_COUNT"


def test_acceptance_by_chance_is_refused_beside_api_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch()
    with pytest.raises(InvalidRequestError, match="benchmarks only") as caught:
        LocalFleetConfig(
            model=Path("m"), methods=(), api_keys=keys, simulated_acceptance="length:2.6"
        )
    assert caught.value.reason == "SIMULATED_ACCEPTANCE"


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_flags, "DRIVER_FILES", ())
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus() == 2
    for visible, count in (("2,3,7", 3), ("", 0), ("-1", 0), ("1,-1,0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count
    listing.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert count_gpus() == 0


def test_a_driver_without_its_tools_counts_as_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(process_flags, "DRIVER_FILES", (driver,))
    assert count_gpus() == 0
    driver.touch()
    assert count_gpus() == 1


@pytest.mark.parametrize(
    ("config", "flag"),
    [(CUDA, "--device"), (replace(CUDA, device="cpu", drafter_device="cuda:0"), "--drafter-dev")],
)
def test_a_gpu_that_is_not_there_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, config: LocalFleetConfig, flag: str
) -> None:
    monkeypatch.setattr(local_cluster, "count_gpus", lambda: 0)
    cluster = LocalCluster(config)
    with pytest.raises(FailedPreconditionError, match=f"{flag}.* needs a GPU") as caught:
        cluster.start()
    assert caught.value.reason == "NO_GPU" and not cluster.processes
