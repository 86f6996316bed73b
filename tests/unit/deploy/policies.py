"""What NetworkPolicies allow, as Kubernetes defines it. Pure: documents in, problems out."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.unit.deploy.manifests import Document, Pod, pods

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
OTLP_PORT, DNS_PORT, HTTPS_PORT = 4317, 53, 443


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod of a namespace, or an address outside of the cluster."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """The named ports of the pod."""
    address: str = ""
    """The address of an end outside of the cluster; "" for a pod."""


DNS = Peer("the cluster's DNS", "kube-system", {"k8s-app": "kube-dns"})
MONITORING = Peer("a pod of monitoring", "monitoring", {"app": "anything"})
INTERNET = Peer("the Internet", address="93.184.216.34")
METADATA_SERVICE = Peer("a metadata service", address="169.254.169.254")


def allows(
    documents: list[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether the policies let `source` connect to a port of `target`."""
    return all(
        _passes(documents, own, other, direction, target, port, protocol)
        for own, other, direction in ((source, target, "Egress"), (target, source, "Ingress"))
    )


def _passes(
    documents: list[Document],
    own: Peer,
    other: Peer,
    direction: str,
    target: Peer,
    port: int,
    protocol: str,
) -> bool:
    """Whether the policies of one end let a connection pass; an end that none selects is open."""
    if own.address:
        return True
    selecting = [
        policy["spec"]
        for policy in documents
        if policy["kind"] == "NetworkPolicy"
        and policy["metadata"]["namespace"] == own.namespace
        and _selects(policy["spec"]["podSelector"], own.labels)
        and direction in policy["spec"]["policyTypes"]
    ]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), ())]
    side = "to" if direction == "Egress" else "from"
    return not selecting or any(
        _is_port(rule, target, port, protocol)
        and (side not in rule or any(_is_peer(peer, other, own) for peer in rule[side]))
        for rule in rules
    )


def _is_port(rule: Document, target: Peer, port: int, protocol: str) -> bool:
    return "ports" not in rule or any(
        entry.get("protocol", "TCP") == protocol
        and (target.ports.get(entry["port"]) if isinstance(entry["port"], str) else entry["port"])
        == port
        for entry in rule["ports"]
    )


def _is_peer(selector: Document, peer: Peer, own: Peer) -> bool:
    if "ipBlock" in selector:
        if not peer.address:
            return False
        address = ipaddress.ip_address(peer.address)
        excluded = selector["ipBlock"].get("except", ())
        inside = address in ipaddress.ip_network(selector["ipBlock"]["cidr"])
        return inside and not any(address in ipaddress.ip_network(block) for block in excluded)
    if peer.address:
        return False
    if "namespaceSelector" not in selector:
        is_there = peer.namespace == own.namespace
    else:
        is_there = _selects(selector["namespaceSelector"], {NAMESPACE_LABEL: peer.namespace})
    return is_there and _selects(selector.get("podSelector", {}), peer.labels)


def _selects(selector: Document, labels: Mapping[str, str]) -> bool:
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions", ()):
        if expression["operator"] != "In":
            raise ValueError(f"{expression['operator']} is not evaluated here")
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def blocked(documents: list[Document]) -> Iterator[str]:
    """Connections that a fleet needs and its policies refuse, and those that they must refuse."""
    for source, target, port, protocol in _needed(documents):
        if not allows(documents, source, target, port, protocol):
            yield f"{source.name} cannot reach {target.name}, port {port}"
    for pod in pods(documents):
        own = _peer(pod, documents)
        if allows(documents, own, METADATA_SERVICE, HTTPS_PORT):
            yield f"{own.name} can reach {METADATA_SERVICE.name}"
        if not _fetches(pod) and allows(documents, own, INTERNET, HTTPS_PORT):
            yield f"{own.name} serves and can reach {INTERNET.name}"
        stranger = Peer("a stranger", own.namespace, {"app": "other"})
        for name, port in own.ports.items():
            if allows(documents, stranger, own, port):
                yield f"{stranger.name} can reach {own.name}, port {name}"


def _needed(documents: list[Document]) -> Iterator[tuple[Peer, Peer, int, str]]:
    """(source, target, port, protocol) of every connection of a fleet that works."""
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    callers = {
        "router": ("verifier", "drafter", "routers"),
        "drafter": ("verifier",),
        "verifier": (),
    }
    for pod in pods(documents):
        own = _peer(pod, documents)
        yield own, DNS, DNS_PORT, "UDP"
        if _fetches(pod):
            yield own, INTERNET, HTTPS_PORT, "TCP"
        for role, container in pod.processes():
            yield own, MONITORING, OTLP_PORT, "TCP"
            for port in container["ports"]:
                if port["name"].startswith("metrics"):
                    yield MONITORING, own, port["containerPort"], "TCP"
            for called in callers[role]:
                (name,) = (name for name in services if name.endswith(f"-{called}"))
                for target, number in _behind(services[name], documents):
                    yield own, target, number, "TCP"
    client = Peer("a client", "elsewhere", {"outrider.io/client": "true"})
    (name,) = (name for name in services if name.endswith("-router"))
    for target, number in _behind(services[name], documents):
        yield client, target, number, "TCP"


def _behind(service: Document, documents: list[Document]) -> Iterator[tuple[Peer, int]]:
    """The pods of a Service, with the number of each port of theirs that it leads to."""
    for pod in pods(documents):
        if service["selector"].items() <= pod.labels.items():
            peer = _peer(pod, documents)
            for port in service["ports"]:
                yield peer, peer.ports[port["targetPort"]]


def _fetches(pod: Pod) -> bool:
    """Whether a pod fetches a model: into a volume of its own, or it serves nothing."""
    own = any("emptyDir" in v for v in pod.spec["volumes"] if v["name"] == "models")
    fetching = any("pull" in c.get("command", ()) for _, c in pod.containers())
    return fetching and (own or not any(True for _ in pod.processes()))


def _peer(pod: Pod, documents: list[Document]) -> Peer:
    (namespace,) = {d["metadata"]["namespace"] for d in documents if d["kind"] == "NetworkPolicy"}
    ports = {
        port["name"]: port["containerPort"]
        for _, container in pod.containers()
        for port in container.get("ports", ())
    }
    return Peer(pod.owner, namespace, pod.labels, ports)
