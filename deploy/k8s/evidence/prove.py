"""Checks every overlay and every Helm values file against Kubernetes' own API servers.

kubernetes.txt holds the output of the last run.

    bash deploy/k8s/evidence/build.sh FOLDER    # etcd, 1.20's control plane, 1.36's CRD server
    python deploy/k8s/evidence/prove.py --binaries FOLDER/bin --crds CRDS > ...

Rendering needs current kubectl and helm. CRDS is a folder with the resource definitions that
KubeRay, LeaderWorkerSet and DisaggregatedSet publish; this repository does not contain them. All
servers listen on loopback.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faults
import yaml
from kubelet import FakeKubelets
from servers import Api, Document, Servers, wait

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location(
    "downgrade", ROOT / "deploy/tools/downgrade_manifests_to_1_20.py"
)
assert _SPEC is not None and _SPEC.loader is not None
downgrade = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(downgrade)


def say(line: str = "") -> None:
    """Write a line of the report to stdout."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Start the servers, run all checks and print the report; returns the exit status.

    A failed check raises AssertionError or TimeoutError.
    """
    parser = argparse.ArgumentParser(
        description="Check the manifests against Kubernetes' own API servers."
    )
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--crds", type=Path)
    arguments = parser.parse_args()
    manifests = dict(render_manifests())
    binaries = arguments.binaries.resolve()
    with tempfile.TemporaryDirectory() as folder, Servers(binaries, Path(folder)) as servers:
        servers.control()
        say(f"# Kubernetes {servers.api.call('GET', '/version')[1]['gitVersion']}")
        with FakeKubelets(servers.api):
            checks = ManifestChecks(servers, manifests)
            checks.apply_all()
            checks.reject_faulty()
            checks.evict_verifiers()
            checks.roll_workloads()
            checks.exceed_gpus()
        if arguments.crds is not None:
            check_custom_resources(servers.crds(), arguments.crds, manifests)
    return 0


def render_manifests() -> Iterator[tuple[str, list[Document]]]:
    """Yield (name, manifests) of every overlay and of the chart with every values file."""
    for path in sorted((ROOT / "deploy/k8s/overlays").glob("*/kustomization.yaml")):
        yield path.parent.name, _documents("kubectl", "kustomize", str(path.parent))
    chart = ROOT / "deploy/helm"
    render = ("helm", "template", "demo", str(chart / "outrider"), "--namespace", "chart")
    yield "chart", _documents(*render)
    for path in sorted(chart.glob("cases/*.yaml")):
        yield f"chart-{path.stem}", _documents(*render, "--values", str(path))


def _documents(*command: str) -> list[Document]:
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def is_ready(pod: Document) -> bool:
    """Whether a pod is Ready and not being deleted."""
    conditions = pod["status"].get("conditions", ())
    up = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return up and "deletionTimestamp" not in pod["metadata"]


class ManifestChecks:
    """Checks on the API server of Kubernetes 1.20, to be run in order."""

    def __init__(self, servers: Servers, manifests: dict[str, list[Document]]) -> None:
        self._servers, self._api, self._manifests = servers, servers.api, manifests

    def apply_all(self) -> None:
        """Apply all manifests, each overlay or chart in its own namespace; wait for ready pods."""
        say("\n## Applied, each in a namespace of its own; pods placed by the scheduler")
        for name, documents in self._manifests.items():
            made, omitted = downgrade.convert(documents, name)
            there = any(document["kind"] == "Namespace" for document in made)
            if not there:
                made.insert(0, _named("Namespace", name))
            if name in ("chart-gpu", "chart-pairs"):
                made.append(_claim(name))
            code, text = self.kubectl(made)
            assert code == 0, text
            # It names classes and nodes that this cluster does not have.
            pods, took_s = (0, 0.0) if name == "chart-extras" else self._all_ready(name)
            ran = f", {pods:2} pods ready in {took_s:3.1f} s" if pods else ""
            others = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(omitted).items()))
            say(
                f"{name:20} {len(made):3} objects accepted{ran}"
                f"{f'; not of Kubernetes itself: {others}' if others else ''}"
            )
            if name in ("gpu", "chart-gpu", "chart-pairs"):
                self.kubectl([_named("Namespace", name)], "delete", "--wait=false")

    def reject_faulty(self) -> None:
        """Submit manifests with one fault each; all but those in faults.PASS must be refused."""
        say("\n## Planted faults, each alone in a set that was accepted")
        made, _ = downgrade.convert(self._manifests["autoscaling"], "autoscaling")
        for name, (kind, plant) in faults.OURS.items():
            broken = copy.deepcopy(next(d for d in made if d["kind"] == kind))
            broken["metadata"]["name"] = "planted"
            plant(broken)
            code, text = self.kubectl([broken], "apply", "--dry-run=server")
            assert (code == 0) == (name in faults.PASS), (name, text)
            say(f"{'refused' if code else 'TAKEN  '} {name}{f': {brief(text)}' if code else ''}")

    def evict_verifiers(self) -> None:
        """Evict verifiers: the disruption budget allows one eviction until that pod is back."""
        say("\n## Evictions of verifiers (pools, maxUnavailable 1)")
        space = "/apis/policy/v1beta1/namespaces/pools/poddisruptionbudgets/outrider-verifier"

        def allowed() -> int:
            return int(self._api.call("GET", space)[1]["status"].get("disruptionsAllowed", 0))

        for number, waits in ((0, True), (1, False), (1, True)):
            if waits:
                wait("the budget", lambda: allowed() == 1)
            status, answer = self._evict(f"outrider-verifier-{number}")
            assert status == (201 if waits else 429), answer
            text = answer.get("message", "")
            say(f"outrider-verifier-{number}: {status} {text if status != 201 else 'evicted'}")

    def roll_workloads(self) -> None:
        """Roll verifiers and routers; at most one of each may be down meanwhile."""
        say("\n## Rolling updates (pools: 3 verifiers, 2 routers)")
        for kind, name, count in (
            ("statefulsets", "outrider-verifier", 3),
            ("deployments", "outrider-router", 2),
        ):
            labels = f"app.kubernetes.io/component={name.removeprefix('outrider-')}"
            path = f"/apis/apps/v1/namespaces/pools/{kind}/{name}"
            wait(f"all of {name}", partial(self._all_serve, labels, count))
            fewest = MinimumPoller(partial(self._serving, "pools", labels))
            with fewest:
                note = {"metadata": {"annotations": {"rolled": "1"}}}
                self._api.call("PATCH", path, {"spec": {"template": note}})
                took_s = wait(name, partial(self._rolled, path, count))
            assert fewest.minimum >= count - 1, fewest.minimum
            say(f"{name}: {took_s:.1f} s, never fewer than {fewest.minimum} of {count} serve")

    def exceed_gpus(self) -> None:
        """Request more GPUs than the nodes have; the last pair must stay pending with a reason."""
        say("\n## More pairs than GPUs (gpu: two GPUs a pair and a node)")
        made, _ = downgrade.convert(self._manifests["gpu"], "gpu-full")
        for document in made:
            if document["kind"] == "StatefulSet":
                document["spec"]["replicas"] = 4
        assert self.kubectl(made)[0] == 0
        events = "/api/v1/namespaces/gpu-full/events"

        def unplaced() -> list[str]:
            found = [e["message"] for e in self._api.items(events)]
            return [text for text in found if "Insufficient nvidia.com/gpu" in text]

        labels = "app.kubernetes.io/component=verifier"
        wait("three pairs", lambda: self._serving("gpu-full", labels) == 3 and bool(unplaced()))
        say(f"3 of 4 pairs run; of the fourth: {unplaced()[0]}")

    def kubectl(self, documents: list[Document], *verb: str) -> tuple[int, str]:
        """Run kubectl 1.20 with these documents; returns (exit status, stderr).

        kubectl validates the documents by the server's schema.
        """
        own = str(self._servers.binaries / "kubectl")
        command = [own, f"--kubeconfig={self._servers.kubeconfig}", *(verb or ("apply",))]
        text = yaml.safe_dump_all(documents)
        done = subprocess.run([*command, "-f", "-"], input=text, capture_output=True, text=True)
        return done.returncode, done.stderr

    def _all_ready(self, name: str) -> tuple[int, float]:
        def done() -> bool:
            return all(
                owner["status"].get("readyReplicas", 0) == owner["spec"]["replicas"]
                and owner["status"].get("observedGeneration") == owner["metadata"]["generation"]
                for kind in ("deployments", "statefulsets")
                for owner in self._api.items(f"/apis/apps/v1/namespaces/{name}/{kind}")
            )

        took_s = wait(name, done, self._servers.alive)
        return len(self._api.items(f"/api/v1/namespaces/{name}/pods")), took_s

    def _serving(self, name: str, labels: str) -> int:
        found = self._api.items(f"/api/v1/namespaces/{name}/pods?labelSelector={labels}")
        return sum(map(is_ready, found))

    def _all_serve(self, labels: str, count: int) -> bool:
        return self._serving("pools", labels) == count

    def _rolled(self, path: str, count: int) -> bool:
        owner = self._api.call("GET", path)[1]
        counts = ("replicas", "updatedReplicas", "readyReplicas")
        seen = owner["status"].get("observedGeneration") == owner["metadata"]["generation"]
        return seen and all(owner["status"].get(name) == count for name in counts)

    def _evict(self, pod: str) -> tuple[int, Document]:
        path = f"/api/v1/namespaces/pools/pods/{pod}/eviction"
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod}}
        return self._api.call("POST", path, body)


class MinimumPoller:
    """Poll a count on a thread from entry to exit, and keep its minimum."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look, self.minimum = look, look()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.minimum = min(self.minimum, self._look())


def check_custom_resources(api: Api, folder: Path, manifests: dict[str, list[Document]]) -> None:
    """Validate manifests of custom resources strictly by the definitions of their projects."""
    group = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    plurals: dict[str, str] = {}
    for path in sorted(folder.glob("*.yaml")):
        definition = yaml.safe_load(path.read_text("utf-8"))
        status, answer = api.call("POST", group, definition)
        assert status == 201, answer
        plurals[definition["spec"]["names"]["kind"]] = definition["spec"]["names"]["plural"]
        name = definition["metadata"]["name"]
        wait(name, lambda name=name: _established(api.call("GET", f"{group}/{name}")[1]))
    say("\n## The server of custom resources, fieldValidation=Strict")
    ours = {d["kind"]: d for found in manifests.values() for d in found if d["kind"] in plurals}

    def post(document: Document) -> tuple[int, str]:
        space = f"namespaces/{document['metadata']['namespace']}/{plurals[document['kind']]}"
        query = "?dryRun=All&fieldValidation=Strict"
        path = f"/apis/{document['apiVersion']}/{space}{query}"
        wait("a new kind", lambda: api.call("GET", path.partition("?")[0])[0] == 200)
        status, answer = api.call("POST", path, document)
        return status, str(answer.get("message", ""))

    for kind, document in sorted(ours.items()):
        status, text = post(document)
        assert status == 201, (kind, text)
        say(f"{kind} {document['metadata']['name']} ({document['apiVersion']}): accepted")
    for name, (kind, plant) in faults.CUSTOM.items():
        broken = copy.deepcopy(ours[kind])
        plant(broken)
        status, text = post(broken)
        assert status == 201 if name in faults.PASS else status in (400, 422), (name, status, text)
        said = "TAKEN  " if status == 201 else "refused"
        say(f"{said} {name}{'' if status == 201 else f': {brief(text)}'}")


def _established(definition: Document) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def _named(kind: str, name: str) -> Document:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}


def _claim(namespace: str) -> Document:
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"]}
    spec["resources"] = {"requests": {"storage": "50Gi"}}
    metadata = {"name": "weights", "namespace": namespace}
    return _named("PersistentVolumeClaim", "") | {"metadata": metadata, "spec": spec}


_PREFACES = ("error validating data: ", " is invalid: ", "Decoder: ", "}: ", "decoding error: ")


def brief(text: str) -> str:
    """The problem itself, extracted from an error message of a server or kubectl."""
    line = " ".join(text.split()).partition("; if you choose")[0].partition(", error found in")[0]
    line = line.partition(", <nil>:")[0]
    for before in _PREFACES:
        line = line.rpartition(before)[2] if before in line else line
    return line[:160]


if __name__ == "__main__":
    sys.exit(main())
