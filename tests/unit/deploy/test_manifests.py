"""Every overlay is built by Kustomize, valid, and says what the processes understand."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from outrider_drafter.metrics import DrafterMetrics as DrafterMetrics
from outrider_router.base.dns_names import split_addresses
from outrider_router.base.metrics import RouterMetrics

import outrider
from outrider.client.commands.main import make_parser
from tests.unit.deploy.manifests import (
    TEARDOWN_S,
    Document,
    outlives,
    pods,
    pre_stop_s,
    problems,
    quantity,
    scales_down_blindly,
)
from tests.unit.deploy.scraping import scrapes, strangers
from tests.unit.deploy.support import (
    KUBERNETES,
    ROOT,
    TOOL_S,
    configs_of,
    load,
    parse,
    stages_of,
    tool,
)

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))


@cache
def built(overlay: str) -> str:
    command = [tool("kubectl"), "kustomize", str(K8S / "overlays" / overlay)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout


@cache
def parsed(overlay: str) -> list[Document]:
    return parse(built(overlay))


def documents(overlay: str) -> list[Document]:
    """What is applied; the caller's own."""
    return copy.deepcopy(parsed(overlay))


def test_there_are_the_overlays_that_the_docs_name() -> None:
    assert {"cpu-demo", "gpu", "pools", "lws", "monitoring", "networkpolicy", "tls"} <= {*OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid_by_schema(overlay: str) -> None:
    for document in documents(overlay):
        # Kinds of other projects have no schema there; their pods are looked at below.
        with contextlib.suppress(kubernetes_validate.SchemaNotFoundError):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_a_field_that_there_is_not_is_refused_by_schema() -> None:
    broken = documents("cpu-demo")
    _verifier(broken)["livenessProbe"]["failureTreshold"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="failureTreshold"):
        for document in broken:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_none_of_the_faults_that_schemas_let_pass(overlay: str) -> None:
    assert problems(documents(overlay)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_configurations_and_flags_are_read_by_the_processes(overlay: str, tmp_path: Path) -> None:
    everything = documents(overlay)
    configs = configs_of(everything, tmp_path)
    for pod in pods(everything):
        for role, container in pod.processes():
            config, ports = configs[role], {p["containerPort"] for p in container["ports"]}
            assert int(config.listen.rpartition(":")[2]) in ports
            assert config.listen.startswith("0.0.0.0:") and config.metrics_host == "0.0.0.0"
            assert config.metrics_port in ports
            if role == "router":
                assert int(config.http.rpartition(":")[2]) in ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_grace_period_covers_pre_stop_and_drain(overlay: str, tmp_path: Path) -> None:
    everything = documents(overlay)
    configs = configs_of(everything, tmp_path)
    for pod in pods(everything):
        for role, container in pod.processes():
            needed = pre_stop_s(container) + configs[role].drain_timeout_s + TEARDOWN_S
            assert pod.spec["terminationGracePeriodSeconds"] >= needed, (pod.owner, role)


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if "ray" not in name])
def test_routers_find_their_peers_by_headless_services(overlay: str, tmp_path: Path) -> None:
    everything = documents(overlay)
    configs = configs_of(everything, tmp_path)
    services = {d["metadata"]["name"]: d["spec"] for d in everything if d["kind"] == "Service"}
    router = configs["router"]
    for peers in (router.verifiers, router.drafters, router.routers):
        plain, names = split_addresses(peers)
        assert not plain and names
        for host, port in names:
            assert services[host]["clusterIP"] == "None"
            # A verifier that drains is not ready and has sessions.
            assert services[host]["publishNotReadyAddresses"] is True
            assert [p["port"] for p in services[host]["ports"]] == [port]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_awake_cores_have_whole_cpus_of_their_own(overlay: str, tmp_path: Path) -> None:
    everything = documents(overlay)
    configs = configs_of(everything, tmp_path)
    for pod in pods(everything):
        for role, container in pod.processes():
            if not getattr(configs[role], "busy_polling_cores", 0):
                continue
            resources = container["resources"]
            assert resources["requests"] == resources["limits"], "the pod is not Guaranteed"
            cpus = quantity(resources["limits"]["cpu"])
            assert cpus == int(cpus) > configs[role].busy_polling_cores


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_of_this_version_and_have_dockerfiles(overlay: str) -> None:
    for pod in pods(documents(overlay)):
        for role, container in pod.processes():
            assert container["image"].endswith(f"outrider-{role}:{outrider.__version__}")
            image = stages_of(role)
            assert f'image.title="outrider-{role}"' in image
            (exposed,) = re.findall(r"^EXPOSE (.*)$", image, re.M)
            assert {str(p["containerPort"]) for p in container["ports"]} == {*exposed.split()}


def test_a_router_gets_the_tokenizer_alone_with_its_own_image() -> None:
    for pod in pods(documents("cpu-demo")):
        (init,) = pod.spec["initContainers"]
        is_router = pod.owner == "Deployment/outrider-router"
        assert init["image"].startswith(f"outrider-{'router' if is_router else 'verifier'}:")
        assert ("--tokenizer-only" in init["command"]) == is_router
        args = make_parser().parse_args(init["command"][1:])
        assert args.tokenizer_only == is_router and args.model == "smollm2-135m"


def test_a_token_comes_from_a_secret_and_only_to_those_that_fetch() -> None:
    for pod in pods(documents("pools")):
        for name, container in pod.containers():
            said = {entry["name"]: entry for entry in container["env"]}
            fetches = "pull" in container.get("command", ())
            assert ("HF_TOKEN" in said) == fetches, name
            if fetches:
                (secret,) = said["HF_TOKEN"]["valueFrom"].values()
                assert secret == {"name": "outrider-hub-token", "key": "token", "optional": True}
            else:
                # Its volume is read-only, and the policies cut it off.
                assert said["HF_HUB_OFFLINE"]["value"] == "1"


def test_clients_are_spread_over_routers_by_connections() -> None:
    for overlay in OVERLAYS:
        services = [d["spec"] for d in documents(overlay) if d["kind"] == "Service"]
        assert not any("sessionAffinity" in spec for spec in services), overlay


LAYOUTS = ([], ["model-cache"], ["cuda"], ["lws"], ["cuda", "lws"], ["disaggregatedset"])


@pytest.mark.parametrize("components", LAYOUTS, ids="+".join)
def test_the_sizes_of_the_docs_are_taken_by_every_layout(
    components: list[str], tmp_path: Path
) -> None:
    """The component that the docs show, listed first, as they say."""
    page = (ROOT / "docs" / "deploy-kubernetes.md").read_text("utf-8")
    shown = page.partition("`big-model/kustomization.yaml`")[2].partition("\n\n")[2]
    text = re.sub("^    ", "", re.split(r"\n\n(?! {4})", shown)[0], flags=re.M)
    base = os.path.relpath(K8S, tmp_path)
    (tmp_path / "big-model").mkdir()
    (tmp_path / "big-model" / "kustomization.yaml").write_text(text + "\n", "utf-8")
    listed = ["big-model", *(f"{base}/components/{name}" for name in components)]
    overlay = {"namespace": "outrider", "resources": [f"{base}/base"], "components": listed}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay), "utf-8")
    command = [tool("kubectl"), "kustomize", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    assert result.returncode == 0 and not result.stderr, result.stderr
    everything = parse(result.stdout)
    assert problems(everything) == []
    for pod in pods(everything):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "8Gi"}
        in_each = "cuda" not in components and "model-cache" not in components
        if in_each:
            assert volumes["models"]["emptyDir"] == {"sizeLimit": "40Gi"}
        for name, container in pod.containers():
            if "pull" not in container.get("command", ()):
                continue
            assert container["command"][-1] == "OWNER/NAME"
            alone = "--tokenizer-only" in container["command"]
            assert alone == ("router" in name)
            assert container["resources"]["limits"]["memory"] == ("1Gi" if alone else "6Gi")
    claims = [d["spec"] for d in everything if d["kind"] == "PersistentVolumeClaim"]
    sizes = [claim["resources"]["requests"]["storage"] for claim in claims]
    assert sizes == (["100Gi"] if {"model-cache", "cuda"} & {*components} else [])


def test_the_pod_of_the_docs_fills_the_volume_of_a_fleet_on_gpus() -> None:
    page = (ROOT / "docs" / "deploy-kubernetes.md").read_text("utf-8")
    (text,) = re.findall(r"```yaml\n(apiVersion: v1\nkind: Pod\n.*?)```", page, re.S)
    (pod,) = parse(text)
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    assert container["image"] == f"outrider-verifier:{outrider.__version__}"
    (mount,) = container["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/models"}
    (claim,) = [d for d in documents("gpu") if d["kind"] == "PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    # It is of the user of the fleet's pods, and passes the pod security of their namespace.
    (verifier,) = [p for p in pods(documents("gpu")) if p.owner == "StatefulSet/outrider-verifier"]
    asked = pod["spec"]["securityContext"]
    assert asked.items() <= verifier.spec["securityContext"].items()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    for name in ("target", "head"):
        assert f"cp {name} {pod['metadata']['name']}:/models/{name}" in page


@pytest.mark.parametrize("overlay", ["autoscaling", "autoscaling-keda"])
def test_autoscalers_ask_for_metrics_that_there_are(overlay: str) -> None:
    scalers = [
        d for d in documents(overlay) if d["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    said = yaml.safe_dump(scalers)
    asked = set(re.findall(r"outrider_[a-z_]+", said))
    service = (ROOT / "verifier" / "outrider_verifier" / "server" / "service.py").read_text("utf-8")
    known = {
        metric.name
        for registry in (RouterMetrics().registry, DrafterMetrics().registry)
        for metric in registry.collect()
    }
    known |= {
        f"outrider_verifier_{name}" for name in re.findall(r'^            "(\w+)":', service, re.M)
    }
    assert asked and asked <= known, asked - known


def test_the_operators_rules_are_those_that_promtool_tests() -> None:
    module = load("prometheus_rule")
    folder = ROOT / "deploy" / "monitoring" / "rules"
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.yml"))]
    written = (K8S / "components" / "monitoring" / "prometheus-rule.yaml").read_text("utf-8")
    assert written == module.prometheus_rule(texts), "run `make generated`"
    groups = [group for text in texts for group in parse(text)[0]["groups"]]
    assert parse(written)[0]["spec"]["groups"] == groups and len(groups) > 1


@pytest.mark.parametrize("overlay", ["monitoring", "monitoring-tls"])
def test_every_process_is_scraped_once_by_the_name_that_rules_call_it(overlay: str) -> None:
    everything = documents(overlay)
    # Where verifier and drafter share a pod, too.
    for fleet in (everything, [d for d in everything if d["kind"] == "PodMonitor"]):
        found = fleet if fleet is everything else [*fleet, *documents("gpu")]
        assert sorted((s.role, s.job) for s in scrapes(found)) == [
            (role, f"outrider-{role}") for role in ("drafter", "router", "verifier")
        ]
    said = yaml.safe_dump([d for d in everything if d["kind"] == "PrometheusRule"])
    assert set(re.findall(r'job="(outrider-\w+)"', said)) == {
        f"outrider-{role}" for role in ("drafter", "router", "verifier")
    }


@pytest.mark.parametrize("overlay", ["monitoring", "monitoring-tls"])
def test_prometheus_and_the_processes_believe_each_other(overlay: str) -> None:
    assert [*strangers(documents(overlay))] == []


def test_a_renewed_authority_is_the_one_that_the_certificates_are_of() -> None:
    found = {d["metadata"]["name"]: d for d in documents("tls") if d["kind"] == "Certificate"}
    assert outlives(found.pop("outrider-ca"), found.values())


def test_locked_processes_and_an_open_monitor_are_found_out() -> None:
    plain = [d for d in documents("monitoring") if d["kind"] == "PodMonitor"]
    locked = [d for d in documents("monitoring-tls") if d["kind"] != "PodMonitor"]
    found = [*strangers(locked + plain)]
    assert sum("TLS at one end only" in problem for problem in found) == 3
    assert sum("keys at one end only" in problem for problem in found) == 1


def test_what_cannot_be_measured_scales_nothing_down() -> None:
    scalers = [d["spec"] for d in documents("autoscaling-keda") if d["kind"] == "ScaledObject"]
    assert len(scalers) == 2 and [*scales_down_blindly(scalers)] == []


def test_yaml_has_no_duplicate_keys_nor_tabs() -> None:
    files = [str(path) for path in sorted(K8S.rglob("*.yaml"))]
    command = [tool("yamllint"), "--strict", "-c", str(ROOT / "deploy" / ".yamllint"), *files]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    assert result.returncode == 0, result.stdout


def _verifier(documents: list[Document]) -> Document:
    found = next(
        d for d in documents if d["kind"] == "StatefulSet" and "verifier" in str(d["metadata"])
    )
    container: Document = found["spec"]["template"]["spec"]["containers"][0]
    return container


FAULTS: dict[str, Callable[[list[Document]], object]] = {
    "no livenessProbe": lambda d: _verifier(d).pop("livenessProbe"),
    "there is no port 9": lambda d: _verifier(d)["readinessProbe"]["grpc"].update(port=9),
    "do not cover loading": lambda d: _verifier(d)["startupProbe"].update(failureThreshold=3),
    "more memory than its limit": lambda d: _verifier(d)["resources"]["requests"].update(
        memory="5Gi"
    ),
    "is no quantity": lambda d: _verifier(d)["resources"]["limits"].update(memory="4GB"),
    "has no version": lambda d: _verifier(d).update(image="outrider-verifier:latest"),
    "names of ports": lambda d: _verifier(d)["ports"][1].update(name="metrics-of-the-verifier"),
    "may gain privileges": lambda d: _verifier(d).pop("securityContext"),
    "there is no volume": lambda d: _verifier(d)["volumeMounts"][0].update(name="elsewhere"),
    "no namespace": lambda d: d[1]["metadata"].pop("namespace"),
    "grpc is TLS, not": lambda d: _verifier(d)["args"].append("--tls-cert=/tls.crt"),
}


@pytest.mark.parametrize("problem", FAULTS)
def test_a_planted_fault_is_found(problem: str) -> None:
    broken = documents("cpu-demo")
    FAULTS[problem](broken)
    assert any(problem in found for found in problems(broken)), problems(broken)


def test_a_group_of_nobody_is_found() -> None:
    broken = documents("lws")
    (group,) = [d for d in broken if d["kind"] == "LeaderWorkerSet"]
    group["spec"]["leaderWorkerTemplate"]["size"] = 0
    assert problems(broken) == ["LeaderWorkerSet/outrider: groups of nobody"]


@pytest.mark.parametrize("kind", ["StatefulSet", "Service", "PodDisruptionBudget"])
def test_a_selector_that_selects_nobody_is_found(kind: str) -> None:
    broken = documents("cpu-demo")
    spec = next(d for d in broken if d["kind"] == kind)["spec"]
    labels = spec["selector"].get("matchLabels", spec["selector"])
    labels["app.kubernetes.io/component"] = "nobody"
    assert problems(broken)
