"""Turns autoscaling on under a fleet of five verifiers, on Kubernetes' own API server.

autoscaling.txt beside this file holds the output of the last run.

    bash deploy/k8s/evidence/build.sh FOLDER
    python deploy/k8s/evidence/handover.py --binaries FOLDER/bin > autoscaling.txt

No metrics are served: an autoscaler only keeps the number of pods between its bounds.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from kubelet import FakeKubelets
from prove import ROOT, Document, MinimumPoller, downgrade, is_ready, say
from servers import Servers, wait

FLEET = 5
WATCH_S = 30.0
"""Two rounds of the autoscaler after each change."""
COMMAND = (
    "kubectl -n {namespace} apply view-last-applied statefulset/outrider-{role} -o yaml"
    " | sed '/^  replicas:/d' | kubectl apply set-last-applied -f -"
)
"""The hand-over of docs/deploy-kubernetes.md."""


class HandOver:
    """One namespace for each way of turning autoscaling on."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers, self._api, self._folder = servers, servers.api, folder

    def kustomize(self, namespace: str, is_handed_over: bool) -> None:
        """Apply overlays/pools with five verifiers, then overlays/autoscaling."""
        plain, scaled = (self._overlay(name, namespace) for name in ("pools", "autoscaling"))
        for document in plain:
            if document["kind"] == "StatefulSet" and "verifier" in document["metadata"]["name"]:
                document["spec"]["replicas"] = FLEET
        self._apply(plain)
        self._wait_for_fleet(namespace, "outrider-verifier")
        if is_handed_over:
            for role in ("verifier", "drafter"):
                self._shell(COMMAND.format(namespace=namespace, role=role))
        self._turn_on(namespace, "outrider-verifier", lambda: self._apply(scaled))
        if is_handed_over:
            self._scale(namespace, "outrider-verifier", FLEET + 1)
            self._turn_on(namespace, "outrider-verifier", lambda: self._apply(scaled))

    def server_side(self, namespace: str) -> None:
        """The same with server-side apply: another manager takes the counts over."""
        plain, scaled = (self._overlay(name, namespace) for name in ("pools", "autoscaling"))
        for document in (*plain, *scaled):
            _name_protocols(document)
        counts = []
        for document in plain:
            if document["kind"] == "StatefulSet":
                name = document["metadata"]["name"]
                count = FLEET if "verifier" in name else document["spec"]["replicas"]
                document["spec"]["replicas"] = count
                metadata = {"name": name, "namespace": namespace}
                count_only = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata}
                counts.append(count_only | {"spec": {"replicas": count}})
        self._apply(plain, "--server-side")
        self._wait_for_fleet(namespace, "outrider-verifier")
        # Without the rest of the object, kubectl's own validation would refuse it.
        self._apply(counts, "--server-side", "--field-manager=autoscaling", "--validate=false")
        turn_on = ["--server-side", "--force-conflicts"]
        self._turn_on(namespace, "outrider-verifier", lambda: self._apply(scaled, *turn_on))

    def chart(self, namespace: str) -> None:
        """The chart, rendered against the API server before and after, and once more."""
        name = "demo-outrider-verifier"
        self._apply([_namespace(namespace)])
        self._apply(self._render(namespace, f"verifier.replicas={FLEET}"))
        self._wait_for_fleet(namespace, name)
        on = "autoscaling.by=hpa"
        self._turn_on(namespace, name, lambda: self._apply(self._render(namespace, on)))
        self._scale(namespace, name, FLEET + 1)
        self._turn_on(namespace, name, lambda: self._apply(self._render(namespace, on)))

    def _turn_on(self, namespace: str, name: str, apply: Callable[[], None]) -> None:
        """Call `apply` and report the fewest verifiers that there were and that are left."""
        before = self._count(namespace, name)
        fewest = MinimumPoller(lambda: self._count(namespace, name))
        serving = MinimumPoller(lambda: self._serving(namespace))
        with fewest, serving:
            apply()
            time.sleep(WATCH_S)
        after = self._count(namespace, name)
        say(
            f"  applied: {before} replicas before, {fewest.minimum} at least, {after} after"
            f" {WATCH_S:.0f} s; {serving.minimum} pods at least were ready"
        )

    def _scale(self, namespace: str, name: str, count: int) -> None:
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale"
        status, _ = self._api.call("PATCH", path, {"spec": {"replicas": count}})
        assert status == 200
        wait("another verifier", lambda: self._serving(namespace) == count, self._servers.alive)
        say(f"  scaled to {count}, as an autoscaler would")

    def _count(self, namespace: str, name: str) -> int:
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}"
        return int(self._api.call("GET", path)[1]["spec"]["replicas"])

    def _serving(self, namespace: str) -> int:
        labels = "app.kubernetes.io/component=verifier"
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={labels}"
        return sum(map(is_ready, self._api.items(path)))

    def _wait_for_fleet(self, namespace: str, name: str) -> None:
        assert self._count(namespace, name) == FLEET
        wait("the fleet", lambda: self._serving(namespace) == FLEET, self._servers.alive)

    def _overlay(self, name: str, namespace: str) -> list[Document]:
        folder = str(ROOT / "deploy/k8s/overlays" / name)
        text = subprocess.run(
            ["kubectl", "kustomize", folder], check=True, capture_output=True, text=True
        ).stdout
        made: list[Document] = downgrade.convert([*yaml.safe_load_all(text)], namespace)[0]
        return made

    def _render(self, namespace: str, setting: str) -> list[Document]:
        """The chart as `helm upgrade` renders it: with look-ups of what is in the cluster.

        Kubernetes 1.20 is older than the chart allows: autoscalers, which its server does not know
        by their present name, are rendered apart, and disruption budgets are left out.
        """
        original, copied = ROOT / "deploy/helm/outrider", self._folder / "chart"
        if not copied.exists():
            shutil.copytree(original, copied)
            (copied / "templates/autoscaling.yaml").unlink()
            text = (copied / "Chart.yaml").read_text("utf-8")
            lines = [line for line in text.splitlines() if not line.startswith("kubeVersion")]
            (copied / "Chart.yaml").write_text("\n".join(lines) + "\n", "utf-8")
        values = ["--namespace", namespace, "--set", f"podDisruptionBudget.enabled=false,{setting}"]
        live = ["--dry-run=server", "--is-upgrade", f"--kubeconfig={self._servers.kubeconfig}"]
        texts = [_helm(str(copied), *values, *live, "--disable-openapi-validation")]
        if "autoscaling" in setting:
            texts.append(_helm(str(original), *values, "--show-only=templates/autoscaling.yaml"))
        documents = [d for text in texts for d in yaml.safe_load_all(text) if d]
        made: list[Document] = downgrade.convert(documents, namespace)[0]
        return made

    def _apply(self, documents: list[Document], *flags: str) -> None:
        self._shell(f"kubectl apply {' '.join(flags)} -f -", yaml.safe_dump_all(documents))

    def _shell(self, command: str, text: str = "") -> None:
        """Run a command line with the kubectl of the server's version."""
        own = self._servers.binaries / "kubectl"
        command = command.replace("kubectl", f"{own} --kubeconfig={self._servers.kubeconfig}")
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command], input=text, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def _name_protocols(node: object) -> None:
    """Say the protocol of every port: 1.20 applies nothing on the server without it."""
    if isinstance(node, dict):
        if "containerPort" in node or ("port" in node and "targetPort" in node):
            node["protocol"] = "TCP"
        for child in node.values():
            _name_protocols(child)
    elif isinstance(node, list):
        for child in node:
            _name_protocols(child)


def _helm(chart: str, *flags: str) -> str:
    command = ["helm", "template", "demo", chart, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _namespace(name: str) -> Document:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def main() -> int:
    """Run every way of turning autoscaling on; returns the exit status."""
    parser = argparse.ArgumentParser(description="Turn autoscaling on under a fleet that runs.")
    parser.add_argument("--binaries", type=Path, required=True)
    binaries = parser.parse_args().binaries.resolve()
    with tempfile.TemporaryDirectory() as folder, Servers(binaries, Path(folder)) as servers:
        servers.control()
        say(f"# Kubernetes {servers.api.call('GET', '/version')[1]['gitVersion']}")
        with FakeKubelets(servers.api):
            check = HandOver(servers, Path(folder))
            say(
                f"\n## kubectl apply of overlays/autoscaling over {FLEET} verifiers, nothing before"
            )
            check.kustomize("naive", is_handed_over=False)
            say("\n## The same after the hand-over of docs/deploy-kubernetes.md")
            check.kustomize("handed-over", is_handed_over=True)
            say("\n## kubectl apply --server-side, counts taken over by another field manager")
            check.server_side("server-side")
            say("\n## The chart with autoscaling.by=hpa")
            check.chart("chart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
