"""Converts Kubernetes manifests to the API of Kubernetes 1.20, for checks with its API server.

Kubernetes 1.20 is the newest version whose complete source a distribution (Debian) ships.

    kubectl kustomize deploy/k8s/overlays/pools \\
        | python deploy/tools/downgrade_manifests_to_1_20.py > old.yaml

Features that 1.20 lacks are replaced: gRPC probes become TCP probes, preStop.sleep becomes a
`sleep` command, and API groups become the beta groups of 1.20. Kinds of other projects are omitted.
--namespace puts all objects into one namespace, so that several overlays can run in one cluster.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from typing import Any

import yaml

Document = dict[str, Any]
_BETAS = {
    ("policy/v1", "PodDisruptionBudget"): "policy/v1beta1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "autoscaling/v2beta2",
}
_OWN_GROUPS = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", *(group for group, _ in _BETAS))
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def convert(documents: list[Document], namespace: str = "") -> tuple[list[Document], list[str]]:
    """Convert manifests; returns (manifests for 1.20, kinds of the omitted ones).

    `namespace`: namespace for all objects; empty keeps theirs. The input is not changed.
    """
    made, omitted = [], []
    for document in copy.deepcopy(documents):
        if document["apiVersion"] not in _OWN_GROUPS:
            omitted.append(document["kind"])
            continue
        document["apiVersion"] = _BETAS.get(
            (document["apiVersion"], document["kind"]), document["apiVersion"]
        )
        if namespace:
            place = "name" if document["kind"] == "Namespace" else "namespace"
            document["metadata"][place] = namespace
        for container in _containers(document):
            _downgrade_container(container)
        made.append(document)
    return made, omitted


def _containers(document: Document) -> Iterator[Document]:
    spec = document.get("spec", {}).get("template", {}).get("spec", {})
    yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


def _downgrade_container(container: Document) -> None:
    """Replace the gRPC probes and the preStop.sleep hook of a container, in place."""
    for name in _PROBES:
        probe = container.get(name, {})
        if "grpc" in probe:
            probe["tcpSocket"] = {"port": probe.pop("grpc")["port"]}
    hook = container.get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        hook["exec"] = {"command": ["sleep", str(hook.pop("sleep")["seconds"])]}


def main() -> int:
    """Convert the manifests on stdin and write them to stdout; returns the exit status."""
    parser = argparse.ArgumentParser(description="Convert manifests to Kubernetes 1.20.")
    parser.add_argument("--namespace", default="", help="namespace for all objects")
    arguments = parser.parse_args()
    documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
    made, omitted = convert(documents, arguments.namespace)
    for kind in omitted:
        sys.stderr.write(f"left out: {kind}\n")
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
