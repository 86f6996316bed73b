"""The chart with pods that hold a verifier and its drafter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.deploy.chart import documents, template
from tests.unit.deploy.manifests import Document, pods, problems
from tests.unit.deploy.support import ROOT, configs_of, parse

PAIRS = "drafter.inVerifierPod=true"


def _of(kind: str, found: list[Document]) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in found if d["kind"] == kind}


def test_the_pods_of_verifiers_hold_the_drafters() -> None:
    found = documents("pairs")
    held = {pod.owner: [role for role, _ in pod.processes()] for pod in pods(found)}
    assert held == {
        "Deployment/demo-outrider-router": ["router"],
        "StatefulSet/demo-outrider-verifier": ["verifier", "drafter"],
    }
    for kind in ("PodDisruptionBudget", "ServiceAccount"):
        assert {*_of(kind, found)} == {"demo-outrider-router", "demo-outrider-verifier"}


def test_routers_find_drafters_at_the_pods_of_verifiers() -> None:
    services = _of("Service", documents("pairs"))
    verifier, drafter = (services[f"demo-outrider-{r}"]["spec"] for r in ("verifier", "drafter"))
    assert drafter["selector"] == verifier["selector"]
    assert [(p["port"], p["targetPort"]) for p in drafter["ports"]] == [(50052, "drafter")]


def test_the_two_containers_share_memory_and_no_certificate() -> None:
    (pair,) = [pod for pod in pods(documents("pairs")) if pod.owner.endswith("-verifier")]
    verifier, drafter = pair.spec["containers"]
    mounted = [{m["mountPath"]: m["name"] for m in c["volumeMounts"]} for c in (verifier, drafter)]
    for path in ("/dev/shm", "/tmp", "/models"):
        assert mounted[0][path] == mounted[1][path]
    volumes = {volume["name"]: volume for volume in pair.spec["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "demo-outrider-verifier-tls"
    assert volumes["tls-drafter"]["secret"]["secretName"] == "demo-outrider-drafter-tls"
    assert mounted[1]["/etc/outrider-drafter-tls"] == "tls-drafter"
    assert "tls-drafter" not in mounted[0].values()
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "8Gi"


def test_settings_of_drafters_reach_their_container() -> None:
    (pair,) = [pod for pod in pods(documents("pairs")) if pod.owner.endswith("-verifier")]
    verifier, drafter = pair.spec["containers"]
    assert [e["name"] for e in drafter["env"]] == ["POD_NAME", "HF_HUB_OFFLINE", "NCCL_DEBUG"]
    assert [e["name"] for e in verifier["env"]] == ["POD_NAME", "HF_HUB_OFFLINE"]
    assert {"/scratch", "/traces"} <= {m["mountPath"] for m in drafter["volumeMounts"]}
    assert {"scratch", "traces"} <= {v["name"] for v in pair.spec["volumes"]}
    assert drafter["resources"]["limits"]["cpu"] == "6"
    # The longer drain is the drafter's.
    assert pair.spec["terminationGracePeriodSeconds"] == 50


def test_the_values_that_the_docs_show_are_a_whole_fleet_on_gpus(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy-kubernetes.md").read_text("utf-8")
    shown = page.partition("**Verifier and drafter in one pod.**")[2].partition("\n\n")[2]
    text = re.sub("^    ", "", re.split(r"\n\n(?! {4})", shown)[0], flags=re.M)
    (tmp_path / "values.yaml").write_text(text, "utf-8")
    result = template("--values", str(tmp_path / "values.yaml"))
    assert result.returncode == 0, result.stderr
    found = parse(result.stdout)
    assert problems(found) == []
    configs = configs_of(found, tmp_path)
    assert {str(config.model) for config in configs.values()} == {"/models/target"}
    for role in ("verifier", "drafter"):
        assert (configs[role].device, configs[role].dtype) == ("cuda", "bfloat16")
    # Not the demo's: as much as the GPU's memory holds.
    assert configs["verifier"].kv_tokens == 0
    heads = {str(configs["verifier"].feature_head), str(configs["drafter"].head)}
    assert heads == {"/models/head"}
    (claim,) = _of("PersistentVolumeClaim", found)
    for pod in pods(found):
        (models,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "models"]
        assert models["persistentVolumeClaim"]["claimName"] == claim
    assert f"`{claim}`" in page


@pytest.mark.parametrize("by", ["hpa", "keda"])
def test_pairs_are_scaled_as_a_whole(by: str) -> None:
    result = template("--set", f"{PAIRS},autoscaling.by={by}")
    assert result.returncode == 0, result.stderr
    scaled = [d["spec"] for d in parse(result.stdout) if "scaleTargetRef" in d.get("spec", {})]
    assert [s["scaleTargetRef"]["name"] for s in scaled] == ["demo-outrider-verifier"]
    assert problems(parse(result.stdout)) == []


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_a_change_of_either_configuration_replaces_the_pods(role: str) -> None:
    def stamps(*settings: str) -> list[str]:
        result = template("--set", ",".join((PAIRS, *settings)))
        assert result.returncode == 0, result.stderr
        return re.findall(r"outrider.io/(?:drafter-)?config: (\w+)", result.stdout)

    changed = zip(stamps(), stamps(f"{role}.config.drain_timeout_s=33"), strict=True)
    assert sum(before != after for before, after in changed) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("drafter.replicas=0", "drafter.replicas is 0: with drafter.inVerifierPod"),
        ("drafter.replicas=3", "set verifier.replicas"),
        ("verifier.config.placement=fused", "verifier.config.placement is fused"),
        ("drafter.tolerations[0].key=gpu", "Set verifier.tolerations"),
        ("drafter.nodeSelector.pool=gpu", "Set verifier.nodeSelector"),
        ("drafter.podLabels.team=blue", "Set verifier.podLabels"),
        (
            "verifier.extraVolumes[0].name=a,drafter.extraVolumes[0].name=a",
            "verifier.extraVolumes has a volume a already",
        ),
    ],
)
def test_settings_that_pairs_cannot_have_are_refused_with_a_reason(setting: str, said: str) -> None:
    result = template("--set", f"{PAIRS},{setting}")
    assert result.returncode != 0 and said in result.stderr, result.stderr
