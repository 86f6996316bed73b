"""What KubeRay's manifests say to Ray and to us is understood there."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider_ray.config import RayFleetConfig

from outrider.spec.plan import DraftMethod

K8S = Path(__file__).parents[3] / "deploy" / "k8s" / "overlays"
SERVICE = K8S / "kuberay" / "ray-service.yaml"
CLUSTER = K8S / "kuberay-cluster" / "ray-cluster.yaml"


def spec_of(path: Path) -> dict[str, Any]:
    """The RayCluster of a manifest."""
    spec: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["spec"]
    return spec.get("rayClusterConfig", spec)


@pytest.fixture
def application() -> dict[str, Any]:
    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    serve = yaml.safe_load(yaml.safe_load(SERVICE.read_text("utf-8"))["spec"]["serveConfigV2"])
    (found,) = serve["applications"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def config(application: dict[str, Any]) -> RayFleetConfig:
    from outrider_ray.serve_app import launch_config

    return launch_config(application["args"])


def test_the_application_is_there_and_takes_its_arguments(
    application: dict[str, Any], config: RayFleetConfig
) -> None:
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    # The head that ships for the model drafts, not n-grams alone.
    assert DraftMethod.EAGLE3 in config.drafter_methods
    # A cell a pod.
    assert config.strategy == "strict-pack"


def test_every_pod_of_a_group_has_room_for_a_cell_and_there_are_pods_for_all(
    config: RayFleetConfig,
) -> None:
    (group,) = spec_of(SERVICE)["workerGroupSpecs"]
    start = group["rayStartParams"]
    # The operator writes it on a shell's command line, quotes included.
    (word,) = shlex.split(start["resources"])
    resources = json.loads(word)
    for member in config.cells[0]:
        resource = config.resource_of(member.role)
        resources[resource] -= 1
    assert min(resources.values()) == 0
    assert int(start["num-cpus"]) >= len(config.cells[0]) * config.cpus_per_actor
    assert group["maxReplicas"] == max(config.max_of)


def test_both_overlays_are_of_the_same_cluster() -> None:
    assert spec_of(SERVICE) == spec_of(CLUSTER)


@pytest.mark.parametrize("path", [SERVICE, CLUSTER], ids=["service", "cluster"])
def test_rays_ports_ask_for_a_token(path: Path) -> None:
    assert spec_of(path)["authOptions"] == {"mode": "token"}
