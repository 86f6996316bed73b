"""Overlays and components combine: what builds can work, and what cannot work is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.deploy.combinations import (
    OVERLAYS,
    Combination,
    build,
    every_combination,
    refusal,
)
from tests.unit.deploy.manifests import Document, pods, problems, scales_down_blindly
from tests.unit.deploy.policies import blocked
from tests.unit.deploy.scraping import scrapes, served_secret, strangers

BATCH = 16
"""Combinations of one process: more of them take longer than their number says."""
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


def batches() -> Iterator[list[Combination]]:
    """Every combination that is not refused: pairs in one order, of the demo in both."""
    for overlay in OVERLAYS:
        found: dict[frozenset[str] | tuple[str, ...], Combination] = {}
        for combination in every_combination():
            if combination.overlay == overlay and refusal(combination) is None:
                pair = combination.components
                found.setdefault(pair if overlay == "cpu-demo" else frozenset(pair), combination)
        combinations = list(found.values())
        assert len(combinations) >= 10 or "ray" in overlay
        for at in range(0, len(combinations), BATCH):
            yield combinations[at : at + BATCH]


@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: f"{batch[0]}...")
def test_a_combination_that_is_not_refused_works(batch: list[Combination], tmp_path: Path) -> None:
    built = build(batch, tmp_path)
    wrong: list[str] = []
    for combination, (namespace, documents) in zip(batch, built.items(), strict=True):
        found = faults(documents, combination, namespace)
        wrong += [f"{combination}: {fault}" for fault in found]
    assert wrong == []


def faults(documents: list[Document], combination: Combination, namespace: str) -> list[str]:
    """What is wrong with the manifests of a combination."""
    members = {*combination.members()}
    found = [*problems(documents), *strangers(documents)]
    kinds = {document["kind"] for document in documents}
    if "networkpolicy" in members:
        found += blocked(documents)
    if "model-cache" in members:
        found += _without_the_volume(documents)
    if "journal" in members:
        found += _without_a_journal(documents)
    if members & {"monitoring"}:
        jobs = sorted(scrape.job for scrape in scrapes(documents))
        if jobs != ["outrider-drafter", "outrider-router", "outrider-verifier"]:
            found.append(f"scraped: {jobs}")
    if members & {"autoscaling", "autoscaling-keda"}:
        if not kinds & {*SCALERS}:
            found.append("nothing is scaled")
        found += _counts(documents)
        found += scales_down_blindly([d["spec"] for d in documents if d["kind"] == "ScaledObject"])
    elif kinds & {*SCALERS}:
        found.append("something is scaled")
    if "tls" in members:
        found += _plain(documents)
    text = json.dumps(documents)
    found += re.findall(r'"namespace": "outrider"|namespace=.{1,2}outrider\b', text)
    found += re.findall(rf"outrider-router\.(?!{namespace}\.)[\w.-]+", text)
    return found


def _without_the_volume(documents: list[Document]) -> list[str]:
    found = []
    for pod in pods(documents):
        (models,) = (v for v in pod.spec["volumes"] if v["name"] == "models")
        if models.get("persistentVolumeClaim") != {"claimName": "outrider-models"}:
            found.append(f"{pod.owner}: models are in {models}")
        serves = any(True for _ in pod.processes())
        if serves and pod.labels["outrider.io/hub-offline"] != "1":
            found.append(f"{pod.owner}: fetches what the Job does")
    return found


def _without_a_journal(documents: list[Document]) -> list[str]:
    """Routers without a journal on a volume of their own."""
    found = []
    for pod in pods(documents):
        for role, container in pod.processes():
            if role != "router":
                continue
            mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            if "--journal=/journal/router.log" not in container["args"]:
                found.append(f"{pod.owner}: has no journal")
            if not pod.owner.startswith("StatefulSet/") or mounted["/journal"] not in pod.claims:
                found.append(f"{pod.owner}: its routers share a journal")
    return found


def _counts(documents: list[Document]) -> list[str]:
    """Workloads that are scaled and whose manifests say a count, or that may shrink to one."""
    found = []
    for scaler in documents:
        if scaler["kind"] not in SCALERS:
            continue
        spec, target = scaler["spec"], scaler["spec"]["scaleTargetRef"]
        if spec.get("minReplicas", spec.get("minReplicaCount", 1)) < 2:
            found.append(f"{target['name']}: may shrink to one")
        for document in documents:
            named = (document["kind"], document["metadata"]["name"])
            if named == (target["kind"], target["name"]) and "replicas" in document["spec"]:
                found.append(f"{target['name']}: its count is reset by every apply")
    return found


def _plain(documents: list[Document]) -> list[str]:
    """Processes without TLS, or with the certificate of another role."""
    found = []
    for pod in pods(documents):
        for role, container in pod.processes():
            secret = served_secret(pod, container)
            if secret != f"outrider-{role}-tls":
                found.append(f"{pod.owner}: {role} serves with {secret}")
            if any("grpc" in container[p] for p in container if p.endswith("Probe")):
                found.append(f"{pod.owner}: {role} is probed without TLS")
    return found
