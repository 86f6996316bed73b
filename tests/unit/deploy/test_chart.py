"""The Helm chart: every set of values renders to manifests without faults; wrong values do not."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import kubernetes_validate
import pytest

import outrider
from outrider.client.local.certificates import make_certificates
from tests.unit.deploy.chart import CASES, CHART, HELM, documents, helm, rendered, template
from tests.unit.deploy.manifests import (
    TEARDOWN_S,
    config_of,
    outlives,
    pods,
    pre_stop_s,
    problems,
    quantity,
    scales_down_blindly,
)
from tests.unit.deploy.policies import Peer, allows, blocked
from tests.unit.deploy.scraping import scrapes, strangers
from tests.unit.deploy.support import (
    KUBERNETES,
    ROOT,
    TOOL_S,
    configs_of,
    load,
    parse,
    tool,
)


@pytest.mark.parametrize("case", CASES)
def test_lint_has_nothing_to_say(case: str) -> None:
    values = ("--values", str(HELM / "cases" / f"{case}.yaml")) if case else ()
    result = helm("lint", "--strict", "--quiet", str(CHART), *values)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_valid_by_schema_and_beyond(case: str) -> None:
    for document in parse(rendered(case)):
        with contextlib.suppress(kubernetes_validate.SchemaNotFoundError):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    assert problems(documents(case)) == []


@pytest.mark.parametrize("case", CASES)
def test_processes_read_their_configuration_and_have_time_to_end(case: str, tmp_path: Path) -> None:
    configs = configs_of(documents(case), tmp_path)
    assert {*configs} == {"router", "verifier", "drafter"}
    for pod in pods(documents(case)):
        for role, container in pod.processes():
            config = configs[role]
            needed = pre_stop_s(container) + config.drain_timeout_s + TEARDOWN_S
            assert pod.spec["terminationGracePeriodSeconds"] >= needed
            if getattr(config, "busy_polling_cores", 0):
                resources = container["resources"]
                assert resources["requests"] == resources["limits"]
                assert quantity(resources["limits"]["cpu"]) > config.busy_polling_cores
    services = {d["metadata"]["name"] for d in documents(case) if d["kind"] == "Service"}
    for address in (*configs["router"].verifiers, *configs["router"].drafters):
        assert re.fullmatch(r"dns:///([a-z-]+):5005[12]", address)
        assert address.removeprefix("dns:///").partition(":")[0] in services


def test_values_come_through_to_the_processes_with_their_types(tmp_path: Path) -> None:
    configs = configs_of(documents("gpu"), tmp_path)
    assert configs["router"].tenants["team a"].weight == 2.5
    assert configs["router"].overload.priority_aging_s == 5.0
    assert configs["router"].queue_limit == 256
    assert configs["verifier"].memory_fraction == 0.85
    assert configs["verifier"].kv_tokens == 0
    assert configs["drafter"].ngram.max_match == 6
    assert [m.value for m in configs["drafter"].methods] == ["eagle3", "ngram"]


def test_a_value_can_be_taken_away() -> None:
    assert "feature_head" in rendered("") and "feature_head" not in rendered("plain")


def test_a_change_of_configuration_rolls_the_pods_of_that_process_alone() -> None:
    changed = template("--set", "verifier.config.max_sessions=8")
    assert changed.returncode == 0, changed.stderr

    def stamps(text: str) -> list[str]:
        return re.findall(r"outrider.io/config: (\w+)", text)

    pairs = zip(stamps(rendered("")), stamps(changed.stdout), strict=True)
    assert sum(before != after for before, after in pairs) == 1


def test_big_numbers_and_strings_of_any_kind_are_written_as_toml(tmp_path: Path) -> None:
    result = template(
        "--set",
        "models.pull=,verifier.config.kv_tokens=10000000",
        "--set-string",
        'verifier.config.model=a"b\\\\<c>',
    )
    assert result.returncode == 0, result.stderr
    verifier = configs_of(parse(result.stdout), tmp_path)["verifier"]
    assert (verifier.kv_tokens, verifier.model) == (10_000_000, 'a"b\\<c>')


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("verifier.replcas=2", "replcas"),
        ("router.config.queue_limt=2", "queue_limt"),
        ("router.config.queue_limit=many", "integer"),
        ("verifier.config.device=3", "string"),
        # The chart's own: a Service would point elsewhere.
        ("router.config.listen=0.0.0.0:1", "listen"),
        ("autoscaling.by=magic", "autoscaling"),
        # The chart's own: routers that share a file have one journal.
        ("router.config.journal=/models/journal", "journal"),
        ("router.journal.volume=pvc", "journal"),
        ("router.journal.size=2GB", "pattern"),
        ("router.service.sessionAffinity=Cookie", "sessionAffinity"),
        ("models.cacheSize=4GB", "pattern"),
        ("models.hubToken.value=hf_secret", "value"),
        ("verifier.resources.limits.memory=4GB", "pattern"),
        ("verifier.startupSeconds=10", "300"),
        ("networkPolicy.dns.prot=53", "prot"),
        ("image.digests.router=sha256:abc", "pattern"),
        ("verifier.extraEnv[0].value=x", "name"),
        ("autoscaling.drafter.min=9,autoscaling.drafter.max=8", "min (9) is greater than max (8)"),
        ("autoscaling.verifier.max=1", "autoscaling.verifier: min (2) is greater than max (1)"),
        # All of these would be without effect, and nobody would see that.
        ("tls.certManager=true", "tls.certManager is true and tls.enabled is false"),
        ("models.persistence.existingClaim=w", "models.persistence.enabled is false"),
        ("models.pull=owner/name", "router.config.model is smollm2-135m"),
        ("drafter.config.model=owner/name", "drafter.config.model is owner/name"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, said: str) -> None:
    result = template("--set", setting)
    assert result.returncode != 0 and said in result.stderr, result.stderr


def test_two_releases_share_no_names_nor_pods() -> None:
    first = parse(rendered(""))
    second = parse(helm("template", "other", str(CHART), "--namespace", "team").stdout)
    names = {(d["kind"], d["metadata"]["name"]) for d in first}
    assert not names & {(d["kind"], d["metadata"]["name"]) for d in second}
    services = [d["spec"]["selector"] for d in first if d["kind"] == "Service"]
    assert not any(s.items() <= pod.labels.items() for s in services for pod in pods(second))


@pytest.mark.parametrize("case", ["", "locked"])
def test_the_notes_say_how_to_reach_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they print is run, but for kubectl: by a shell, against a server with the router's
    certificate."""
    notes = _notes(case)
    assert "port-forward service/demo-outrider-router 8000 50050" in notes
    (asked,) = re.findall(r"^ +(curl .*)$", notes, re.M)
    if case:
        assert "get secret demo-outrider-router-tls" in notes
        make_certificates(tmp_path)
        (tmp_path / "ca.pem").rename(tmp_path / "ca.crt")
        monkeypatch.setenv("OUTRIDER_API_KEY", "sk-test")
    with _server(tmp_path if case else None) as (heard, port):
        command = [tool("sh"), "-c", asked.replace("8000", str(port))]
        result = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=TOOL_S
        )
    assert (result.returncode, result.stdout) == (0, "models"), result.stderr
    assert heard == ["Bearer sk-test" if case else None]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("tls.enabled=true", "no API key is required"),
        ("ingress.enabled=true", "no API key is required. Everybody who reaches the routers, also"),
        ("apiKeys.existingSecret=keys", "API keys are readable on the way"),
        ("apiKeys.existingSecret=keys,tls.enabled=true,tls.certManager=true", ""),
    ],
)
def test_the_notes_warn_of_what_is_open(settings: str, said: str) -> None:
    notes = _notes("", "--set", settings)
    assert said in notes and ("WARNING" in notes) == bool(said)
    assert ("Secrets exist: demo-outrider-router-tls" in notes) == (settings == "tls.enabled=true")


def _notes(case: str, *flags: str) -> str:
    values = ("--values", str(HELM / "cases" / f"{case}.yaml")) if case else ()
    install = ("install", "demo", str(CHART), "--dry-run=client", "--namespace", "team")
    result = helm(*install, *values, *flags)
    if result.returncode:
        pytest.skip("this Helm renders notes with a cluster only")
    return result.stdout.partition("\nNOTES:\n")[2]


@contextlib.contextmanager
def _server(certificates: Path | None) -> Generator[tuple[list[str | None], int]]:
    """A server on loopback that answers once; the Authorization that it hears, and its port."""
    heard: list[str | None] = []

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers.get("Authorization"))
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(b"models")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Models)
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "router.pem", certificates / "router-key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        yield heard, server.server_port
        thread.join(TOOL_S)


PAIRS = "drafter.inVerifierPod=true"


@pytest.mark.parametrize(
    "flags",
    [("apiKeys.existingSecret=keys",), ("tls.enabled=true",), (), (PAIRS, "tls.enabled=true")],
)
def test_prometheus_and_the_processes_believe_each_other(flags: tuple[str, ...]) -> None:
    settings = ["monitoring.podMonitor=true", *flags]
    settings.append("monitoring.operatorKeySecret=outrider-operator-key")
    if "tls.enabled=true" in flags:
        settings.append("tls.certManager=true")
    result = template("--set", ",".join(settings))
    assert result.returncode == 0, result.stderr
    everything = parse(result.stdout)
    assert sorted(s.job for s in scrapes(everything)) == [
        "outrider-drafter",
        "outrider-router",
        "outrider-verifier",
    ]
    assert [*strangers(everything)] == []


def test_keys_without_one_for_prometheus_are_refused() -> None:
    result = template("--set", "monitoring.podMonitor=true,apiKeys.existingSecret=keys")
    assert result.returncode != 0 and "monitoring.operatorKeySecret" in result.stderr


def test_what_cannot_be_measured_scales_nothing_down() -> None:
    scalers = [d["spec"] for d in documents("keda") if d["kind"] == "ScaledObject"]
    assert len(scalers) == 2 and [*scales_down_blindly(scalers)] == []


def test_autoscalers_do_not_count_other_releases_in_the_namespace() -> None:
    queries = [
        trigger["metadata"]["query"]
        for d in documents("keda")
        if d["kind"] == "ScaledObject"
        for trigger in d["spec"]["triggers"]
    ]
    assert len(queries) == 3
    for query in queries:
        (namespace, pattern) = re.findall(r'(?:namespace|pod)=~?"([^"]*)"', query)
        role = re.findall(r"outrider_(verifier|drafter)_", query) or ["router"]
        pod = f"demo-outrider-{role[0]}-0"
        assert namespace == "team" and re.fullmatch(pattern, pod)
        assert not re.fullmatch(pattern, f"other-outrider-{role[0]}-0")
    monitored = template("--set", "autoscaling.by=hpa,monitoring.podMonitor=true").stdout
    labels = [
        metric["external"]["metric"]["selector"]["matchLabels"]
        for d in parse(monitored)
        if d["kind"] == "HorizontalPodAutoscaler"
        for metric in d["spec"]["metrics"]
        if metric["type"] == "External"
    ]
    assert labels == [{"fleet": "demo"}]


def test_fleets_shrink_to_two_at_least_and_nobody_is_scaled_up_from_none() -> None:
    for case in ("hpa", "keda"):
        scalers = [d["spec"] for d in documents(case) if "scaleTargetRef" in d.get("spec", {})]
        assert {spec.get("minReplicas", spec.get("minReplicaCount")) for spec in scalers} == {2}
    result = template("--set", "autoscaling.by=hpa,drafter.replicas=0")
    assert result.returncode == 0, result.stderr
    found = parse(result.stdout)
    scaled = [d["metadata"]["name"] for d in found if d["kind"] == "HorizontalPodAutoscaler"]
    assert scaled == ["demo-outrider-verifier"]
    counts = {
        d["metadata"]["name"]: d["spec"].get("replicas")
        for d in found
        if d["kind"] == "StatefulSet"
    }
    assert counts == {"demo-outrider-verifier": None, "demo-outrider-drafter": 0}


def test_what_a_cluster_needs_reaches_the_pods() -> None:
    found = {pod.owner.rpartition("-")[2]: pod for pod in pods(documents("extras"))}
    router, verifier, drafter = (found[role].spec for role in ("router", "verifier", "drafter"))
    (container,) = verifier["containers"]
    assert container["image"] == f"outrider-verifier@sha256:{'a' * 64}"
    assert [e["name"] for e in container["env"]] == ["POD_NAME", "HF_HUB_OFFLINE", "NCCL_DEBUG"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert {"name": "scratch", "mountPath": "/scratch"} in container["volumeMounts"]
    assert verifier["runtimeClassName"] == "nvidia" and "nodeAffinity" in verifier["affinity"]
    assert verifier["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert router["priorityClassName"] == "serving"
    (spread,) = router["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert drafter["affinity"] == {"podAntiAffinity": {}}
    for pod in found.values():
        assert [e["name"] for e in pod.spec["initContainers"][0]["env"]] == ["PIP_INDEX_URL"]
        assert pod.spec["containers"][0]["env"][1] == {"name": "HF_HUB_OFFLINE", "value": "1"}
    annotated = [d for d in documents("extras") if "annotations" in d["metadata"]]
    assert {d["kind"] for d in annotated} == {"Service", "ServiceAccount"}


VOLUME = "models.persistence.enabled=true"


@pytest.mark.parametrize(
    "settings", ["", VOLUME, f"{VOLUME},models.pull=", "tls.enabled=true", PAIRS]
)
def test_policies_allow_what_is_needed_and_nothing_else(settings: str) -> None:
    result = template("--set", ",".join(filter(None, ["networkPolicy.enabled=true", settings])))
    assert result.returncode == 0, result.stderr
    assert [*blocked(parse(result.stdout))] == []


def test_a_renewed_authority_is_the_one_that_the_certificates_are_of() -> None:
    """cert-manager does not renew the certificates of peers when it renews their authority."""
    found = {d["metadata"]["name"]: d for d in documents("locked") if d["kind"] == "Certificate"}
    assert outlives(found.pop("demo-outrider-ca"), found.values())
    assert found["demo-outrider-operator"]["spec"]["usages"] == ["client auth"]


def test_where_names_are_resolved_and_traces_go_is_a_setting() -> None:
    peer = "networkPolicy.dns.port=5353,networkPolicy.dns.to[0].ipBlock.cidr=10.0.0.10/32"
    result = template("--set", f"networkPolicy.enabled=true,networkPolicy.traces.to=null,{peer}")
    assert result.returncode == 0, result.stderr
    found = [*blocked(parse(result.stdout))]
    assert any("the cluster's DNS" in problem for problem in found)
    assert any("a pod of monitoring, port 4317" in problem for problem in found)
    resolver = Peer("resolver", address="10.0.0.10")
    pod = Peer("pod", "team", next(p.labels for p in pods(parse(result.stdout))))
    assert allows(parse(result.stdout), pod, resolver, 5353, "UDP")


def test_the_schema_of_the_values_is_that_of_the_processes() -> None:
    module = load("values_schema")
    fresh = module.values_schema((HELM / "values.schema.in.json").read_text("utf-8"))
    written = (CHART / "values.schema.json").read_text("utf-8")
    assert written == fresh, "run `make generated`"
    router = json.loads(written)["properties"]["router"]["properties"]["config"]["properties"]
    assert "queue_limit" in router and "listen" not in router


def test_chart_and_images_are_of_this_version() -> None:
    chart = parse((CHART / "Chart.yaml").read_text("utf-8"))[0]
    assert chart["appVersion"] == chart["version"] == outrider.__version__


def test_the_chart_says_what_the_base_of_kustomize_says() -> None:
    """Both are the same deployment: what the processes are told may differ in names alone."""
    base = ROOT / "deploy" / "k8s" / "base"
    everything = documents("")
    for pod in pods(everything):
        for role, container in pod.processes():
            chart = _keys(config_of(everything, pod, container))
            assert chart == _keys((base / f"{role}.toml").read_text("utf-8"))


def _keys(toml: str) -> set[str]:
    return set(re.findall(r"^(\w+) =", toml, re.M))
