"""Mistakes planted in manifests that are right, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Document = dict[str, Any]
Plant = Callable[[Document], object]


def _pod(document: Document) -> Document:
    spec: Document = document["spec"]["template"]["spec"]
    return spec


def _first(document: Document) -> Document:
    container: Document = _pod(document)["containers"][0]
    return container


OURS: dict[str, tuple[str, Plant]] = {
    "an unknown field": ("Deployment", lambda d: d["spec"].update(replcas=2)),
    "an unknown field of a probe": (
        "StatefulSet",
        lambda d: _first(d)["livenessProbe"].update(failureTreshold=3),
    ),
    "a count that is a word": ("Deployment", lambda d: d["spec"].update(replicas="two")),
    "a selector beside the labels": (
        "Deployment",
        lambda d: d["spec"]["selector"]["matchLabels"].update(role="nobody"),
    ),
    "no quantity": ("StatefulSet", lambda d: _first(d)["resources"]["limits"].update(memory="4GB")),
    "a request beyond its limit": (
        "Deployment",
        lambda d: _first(d)["resources"]["requests"].update(memory="9Gi"),
    ),
    "a long name of a port": (
        "Deployment",
        lambda d: _first(d)["ports"][0].update(name="grpc-of-the-router"),
    ),
    "a volume that is not there": (
        "Deployment",
        lambda d: _first(d)["volumeMounts"][0].update(name="elsewhere"),
    ),
    "two containers of one name": ("Deployment", lambda d: _pod(d)["containers"].append(_first(d))),
    "no image": ("Deployment", lambda d: _first(d).pop("image")),
    "a probe with two handlers": (
        "Deployment",
        lambda d: _first(d)["livenessProbe"].update(exec={"command": ["true"]}),
    ),
    "a port that is none": ("Service", lambda d: d["spec"]["ports"][0].update(port=0)),
    "a budget with both bounds": (
        "PodDisruptionBudget",
        lambda d: d["spec"].update(minAvailable=1),
    ),
    "fewer at most than at least": (
        "HorizontalPodAutoscaler",
        lambda d: d["spec"].update(minReplicas=9),
    ),
    "a spread over nothing": (
        "StatefulSet",
        lambda d: _pod(d).update(topologySpreadConstraints=[{"maxSkew": 0}]),
    ),
    # Of a StatefulSet 1.20 looks at pods when they are made; and no server knows what a probe is
    # for. tests/unit/deploy/manifests.py finds these three.
    "a volume that is not there, of a StatefulSet": (
        "StatefulSet",
        lambda d: _first(d)["volumeMounts"][0].update(name="elsewhere"),
    ),
    "a probe of no port": (
        "Deployment",
        lambda d: _first(d)["livenessProbe"].update(tcpSocket={"port": "nowhere"}),
    ),
    "no probe": ("StatefulSet", lambda d: _first(d).pop("livenessProbe")),
}
"""By what they are: the kind that they are planted in, and how."""
PASS = (
    *("a volume that is not there, of a StatefulSet", "a probe of no port", "no probe"),
    "LeaderWorkerSet: groups of nobody",
)


def _ray(document: Document) -> Document:
    spec: Document = document["spec"]
    found: Document = spec.get("rayClusterConfig", spec)
    return found


def _worker(document: Document) -> Document:
    group: Document = _ray(document)["workerGroupSpecs"][0]
    return group


def _lead(document: Document) -> Document:
    spec: Document = document["spec"]["leaderWorkerTemplate"]
    return spec


CUSTOM: dict[str, tuple[str, Plant]] = {
    "RayCluster: an unknown field": ("RayCluster", lambda d: d["spec"].update(workers=2)),
    "RayCluster: an unknown field of a pod": (
        "RayCluster",
        lambda d: _worker(d)["template"]["spec"].update(hostNetwrk=True),
    ),
    "RayCluster: a count that is a word": (
        "RayCluster",
        lambda d: _worker(d).update(replicas="two"),
    ),
    "RayCluster: no pods": ("RayCluster", lambda d: _worker(d).pop("template")),
    "RayCluster: no quantity": (
        "RayCluster",
        lambda d: _worker(d)["template"]["spec"]["containers"][0]["resources"]["limits"].update(
            memory="four"
        ),
    ),
    "RayCluster: an unknown mode": (
        "RayCluster",
        lambda d: d["spec"]["authOptions"].update(mode="magic"),
    ),
    "RayService: an unknown field": ("RayService", lambda d: d["spec"].update(serveConfig="x")),
    "RayService: a wrong type": ("RayService", lambda d: d["spec"].update(serveConfigV2={"a": 1})),
    "LeaderWorkerSet: an unknown policy": (
        "LeaderWorkerSet",
        lambda d: _lead(d).update(restartPolicy="Perhaps"),
    ),
    "LeaderWorkerSet: groups of nobody": ("LeaderWorkerSet", lambda d: _lead(d).update(size=0)),
    "LeaderWorkerSet: no workers": (
        "LeaderWorkerSet",
        lambda d: _lead(d).pop("workerTemplate"),
    ),
    "LeaderWorkerSet: an unknown field": ("LeaderWorkerSet", lambda d: d["spec"].update(size=2)),
    "DisaggregatedSet: no roles": ("DisaggregatedSet", lambda d: d["spec"].pop("roles")),
    "DisaggregatedSet: a role without name": (
        "DisaggregatedSet",
        lambda d: d["spec"]["roles"][0].pop("name"),
    ),
    "DisaggregatedSet: an unknown field": ("DisaggregatedSet", lambda d: d["spec"].update(rolls=1)),
}
"""The same, for kinds of other projects."""
