"""Whom a PodMonitor has Prometheus scrape, and as what. Pure: documents in, scrapes out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.unit.deploy.manifests import Document, Pod, pods

_LABEL = "__meta_kubernetes_pod_label_"


@dataclass(frozen=True)
class Scrape:
    """One process that one endpoint of a PodMonitor scrapes."""

    role: str
    job: str
    pod: Pod
    container: Document
    endpoint: Document


def scrapes(documents: list[Document]) -> Iterator[Scrape]:
    """Every process that is scraped, as often as it is."""
    for monitor in documents:
        if monitor["kind"] != "PodMonitor":
            continue
        selector = monitor["spec"]["selector"]["matchLabels"]
        for pod in pods(documents):
            if selector.items() <= pod.labels.items():
                yield from _of_pod(monitor["spec"]["podMetricsEndpoints"], pod)


def _of_pod(endpoints: list[Document], pod: Pod) -> Iterator[Scrape]:
    for role, container in pod.processes():
        names = {port["name"] for port in container["ports"]}
        for endpoint in endpoints:
            if endpoint["port"] not in names:
                continue
            job = _job(endpoint["relabelings"], pod.labels)
            if job is not None:
                yield Scrape(role, job, pod, container, endpoint)


def _job(relabelings: list[Document], labels: Mapping[str, str]) -> str | None:
    """What relabelling leaves of the label `job`; None for a target that it drops."""
    target = {_LABEL + re.sub(r"\W", "_", key): value for key, value in labels.items()}
    target["job"] = ""
    for rule in relabelings:
        value = ";".join(target.get(name, "") for name in rule.get("sourceLabels", ()))
        match = re.fullmatch(rule.get("regex", "(.*)"), value)
        if rule.get("action", "replace") == "keep":
            if match is None:
                return None
        elif match is not None:
            replacement = rule["replacement"].replace("$1", r"\1")
            target[rule["targetLabel"]] = match.expand(replacement)
    return target["job"]


def strangers(documents: list[Document]) -> Iterator[str]:
    """What keeps processes from believing Prometheus, or it from believing them."""
    certificates = {
        d["spec"]["secretName"]: d["spec"].get("dnsNames", ())
        for d in documents
        if d["kind"] == "Certificate"
    }
    for scrape in scrapes(documents):
        arguments = " ".join(scrape.container["args"])
        tls = scrape.endpoint.get("tlsConfig", {})
        if ("--tls-cert" in arguments) != (scrape.endpoint.get("scheme") == "https"):
            yield f"{scrape.job}: TLS at one end only"
        if ("--api-keys" in arguments) != ("authorization" in scrape.endpoint):
            yield f"{scrape.job}: keys at one end only"
        if not tls:
            continue
        served = served_secret(scrape.pod, scrape.container)
        if served is None or tls.get("serverName") not in certificates[served]:
            yield f"{scrape.job}: {tls.get('serverName')} is not in {served}"
        if "operator.outrider.internal" not in certificates[tls["cert"]["secret"]["name"]]:
            yield f"{scrape.job}: scraped by no operator"


def served_secret(pod: Pod, container: Document) -> str | None:
    """The Secret of the certificate that a process serves with; None without TLS."""
    for argument in container["args"]:
        flag, _, path = argument.partition("=")
        if flag == "--tls-cert":
            folder = path.rpartition("/")[0]
            mount = next(m for m in container["volumeMounts"] if m["mountPath"] == folder)
            volume = next(v for v in pod.spec["volumes"] if v["name"] == mount["name"])
            name = volume["secret"]["secretName"]
            assert isinstance(name, str)
            return name
    return None
