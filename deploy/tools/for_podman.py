"""Converts manifests for `podman play kube`, which supports Pods, Deployments and ConfigMaps.

    kubectl kustomize deploy/k8s/overlays/cpu-demo | python deploy/tools/for_podman.py > demo.yaml

A Deployment or StatefulSet becomes one pod with the name that a StatefulSet gives its first pod.
What podman does not support is left out: Services, PodDisruptionBudgets, ServiceAccounts, probes
and spreading. A claim is a volume of the same name, which must exist. --host NAME=ADDRESS adds the
name of a Service to the pods' hosts files.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import yaml

Document = dict[str, Any]
_KEPT = ("ConfigMap", "Secret")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
_PLACING = ("affinity", "topologySpreadConstraints", "serviceAccountName", "enableServiceLinks")


def convert(documents: list[Document], hosts: dict[str, str], images: str) -> list[Document]:
    """Return pods and the objects that they mount. `hosts` maps names of Services to addresses;
    `images` is the prefix of the names of images."""
    kept = [document for document in documents if document["kind"] in _KEPT]
    for document in kept:
        document["metadata"].pop("namespace", None)
    made = [
        _pod(document, hosts, images)
        for document in documents
        if document["kind"] in ("Deployment", "StatefulSet")
    ]
    return kept + made


def _pod(document: Document, hosts: dict[str, str], images: str) -> Document:
    name = f"{document['metadata']['name']}-0"
    template = document["spec"]["template"]
    spec = {key: value for key, value in template["spec"].items() if key not in _PLACING}
    # "Always" would have podman start init containers again and again.
    spec["restartPolicy"] = "Never"
    spec["hostAliases"] = [{"ip": ip, "hostnames": [host]} for host, ip in hosts.items()]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = images + container["image"]
        for key in _PROBES:
            container.pop(key, None)
        for key in ("args", "command"):
            if key in container:
                container[key] = [word.replace("$(POD_NAME)", name) for word in container[key]]
    labels = template["metadata"]["labels"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Manifests for podman play kube.")
    parser.add_argument("--host", action="append", default=[], metavar="NAME=ADDRESS")
    parser.add_argument("--images", default="localhost/", help="what names of images begin with")
    arguments = parser.parse_args()
    hosts = dict(host.split("=", 1) for host in arguments.host)
    documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
    yaml.safe_dump_all(convert(documents, hosts, arguments.images), sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
