"""Manifests as Kubernetes 1.20 takes them, the newest whose source a distribution ships whole.

    kubectl kustomize deploy/k8s/overlays/pools | python deploy/tools/for_1_20.py > old.yaml

Says the same with what that version knows: gRPC probes become open ports, preStop.sleep a `sleep`,
and API groups the betas that they had. Kinds of other projects are left out; --namespace puts
everything into one namespace, so that sets can stand beside each other.
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
_OWN_GROUPS = ("v1", "apps/v1", "networking.k8s.io/v1", *(group for group, _ in _BETAS))
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def convert(documents: list[Document], namespace: str = "") -> tuple[list[Document], list[str]]:
    """What 1.20 takes, and the kinds of what it does not know."""
    made, left = [], []
    for document in copy.deepcopy(documents):
        if document["apiVersion"] not in _OWN_GROUPS:
            left.append(document["kind"])
            continue
        document["apiVersion"] = _BETAS.get(
            (document["apiVersion"], document["kind"]), document["apiVersion"]
        )
        if namespace:
            place = "name" if document["kind"] == "Namespace" else "namespace"
            document["metadata"][place] = namespace
        for container in _containers(document):
            _age(container)
        made.append(document)
    return made, left


def _containers(document: Document) -> Iterator[Document]:
    spec = document.get("spec", {}).get("template", {}).get("spec", {})
    yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


def _age(container: Document) -> None:
    for name in _PROBES:
        probe = container.get(name, {})
        if "grpc" in probe:
            probe["tcpSocket"] = {"port": probe.pop("grpc")["port"]}
    hook = container.get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        hook["exec"] = {"command": ["sleep", str(hook.pop("sleep")["seconds"])]}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Manifests for Kubernetes 1.20.")
    parser.add_argument("--namespace", default="", help="put everything there")
    arguments = parser.parse_args()
    documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
    made, left = convert(documents, arguments.namespace)
    for kind in left:
        sys.stderr.write(f"left out: {kind}\n")
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
