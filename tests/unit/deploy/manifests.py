"""What must hold of manifests beyond their schemas. Pure: documents in, problems out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Document = dict[str, Any]

PROCESSES = ("router", "verifier", "drafter")
TEARDOWN_S = 5.0
"""What a process needs after its drain to close."""
_UNITS = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate(("", "k", "M", "G", "T"))},
    **{unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)},
}
_CLUSTER_SCOPED = ("Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")


@dataclass(frozen=True)
class Pod:
    """A pod template and what makes pods of it."""

    owner: str
    spec: Document
    labels: Mapping[str, str]
    selector: Mapping[str, str] | None
    claims: frozenset[str] = frozenset()
    """Volumes that every pod has for itself, by claims that are made with it."""

    def containers(self) -> Iterator[tuple[str, Document]]:
        for container in (*self.spec.get("initContainers", ()), *self.spec["containers"]):
            yield f"{self.owner}/{container['name']}", container

    def processes(self) -> Iterator[tuple[str, Document]]:
        """Containers of Outrider's processes, by the process; a command is none."""
        for container in self.spec["containers"]:
            if "command" in container:
                continue
            name = re.split("[:@]", container["image"].rpartition("/")[2])[0]
            if name.startswith("outrider-") and name.removeprefix("outrider-") in PROCESSES:
                yield name.removeprefix("outrider-"), container


def pods(documents: list[Document]) -> list[Pod]:
    """Every pod template, at whatever depth its kind has it."""
    return [pod for document in documents for pod in _pods_of(document)]


def _pods_of(document: Document) -> Iterator[Pod]:
    owner = f"{document['kind']}/{document['metadata']['name']}"
    spec = document.get("spec", {})
    selector = spec.get("selector", {}).get("matchLabels") if "template" in spec else None
    claims = frozenset(c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", ()))
    for template in _templates(spec):
        labels = template.get("metadata", {}).get("labels", {})
        yield Pod(owner, template["spec"], labels, selector, claims)


def _templates(node: object) -> Iterator[Document]:
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}) and "template" not in node:
            yield node
            return
        for child in node.values():
            yield from _templates(child)
    elif isinstance(node, list):
        for child in node:
            yield from _templates(child)


def quantity(text: object) -> Decimal:
    """A Kubernetes quantity. Raises ValueError."""
    word = str(text)
    number = word.rstrip("KMGTikm")
    if word[len(number) :] not in _UNITS or not number:
        raise ValueError(f"{text!r} is no quantity")
    try:
        return Decimal(number) * _UNITS[word[len(number) :]]
    except ArithmeticError:
        raise ValueError(f"{text!r} is no quantity") from None


def problems(documents: list[Document]) -> list[str]:
    """Everything that is wrong with a set of manifests that are applied together."""
    found = [*_unplaced(documents), *_budgets(documents), *_services(documents)]
    found += [*_references(documents), *_backends(documents)]
    found += _scalers(documents)
    for pod in pods(documents):
        found += _selectors(pod)
        found += _hardening(pod)
        for name, container in pod.containers():
            found += [f"{name}: {problem}" for problem in _container(container)]
        for process, container in pod.processes():
            where = f"{pod.owner}/{container['name']}"
            found += [f"{where}: {problem}" for problem in _probes(process, container)]
    return found


def _unplaced(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] not in _CLUSTER_SCOPED and not document["metadata"].get("namespace"):
            yield f"{document['kind']}/{document['metadata']['name']}: no namespace"


def _selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def _selectors(pod: Pod) -> Iterator[str]:
    if pod.selector is not None and not _selects(pod.selector, pod.labels):
        yield f"{pod.owner}: its selector is not in its template's labels"


def _budgets(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] != "PodDisruptionBudget":
            continue
        name, spec = document["metadata"]["name"], document["spec"]
        if ("minAvailable" in spec) == ("maxUnavailable" in spec):
            yield f"PodDisruptionBudget/{name}: one of minAvailable and maxUnavailable"
        if not any(
            _selects(spec["selector"]["matchLabels"], pod.labels) for pod in pods(documents)
        ):
            yield f"PodDisruptionBudget/{name}: selects nobody"


def _services(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] != "Service":
            continue
        name, spec = document["metadata"]["name"], document["spec"]
        behind = [pod for pod in pods(documents) if _selects(spec["selector"], pod.labels)]
        if not behind:
            yield f"Service/{name}: selects nobody"
        for port in spec["ports"]:
            for pod in behind:
                if port.get("targetPort", port["port"]) not in _ports(pod):
                    yield f"Service/{name}: {pod.owner} has no port {port['targetPort']}"
                plain = port.get("appProtocol") in ("http", "kubernetes.io/h2c")
                if plain and any("--tls-cert" in str(c["args"]) for _, c in pod.processes()):
                    yield f"Service/{name}: port {port['name']} is TLS, not {port['appProtocol']}"


def _backends(documents: list[Document]) -> Iterator[str]:
    """Ports of Services to which an Ingress or a route sends requests, and which are not there."""
    there = {
        (d["metadata"]["name"], port[key])
        for d in documents
        if d["kind"] == "Service"
        for port in d["spec"]["ports"]
        for key in ("name", "port")
    }
    for document in documents:
        where = f"{document['kind']}/{document['metadata']['name']}"
        rules = document.get("spec", {}).get("rules", ())
        if document["kind"] == "Ingress":
            services = [p["backend"]["service"] for rule in rules for p in rule["http"]["paths"]]
            named = [(s["name"], *s["port"].values()) for s in services]
        elif document["kind"] in ("HTTPRoute", "GRPCRoute"):
            named = [(b["name"], b["port"]) for rule in rules for b in rule["backendRefs"]]
        else:
            continue
        for backend in named:
            if backend not in there:
                yield f"{where}: there is no port {backend[1]} of Service/{backend[0]}"


def _ports(pod: Pod) -> set[object]:
    ports = [port for _, container in pod.containers() for port in container.get("ports", ())]
    return {port["containerPort"] for port in ports} | {port.get("name") for port in ports}


def _references(documents: list[Document]) -> Iterator[str]:
    there = {(d["kind"], d["metadata"]["name"]) for d in documents}
    there |= {("Secret", d["spec"]["secretName"]) for d in documents if d["kind"] == "Certificate"}
    # Made by hand, before: keys are in no repository.
    there |= {("Secret", "outrider-api-keys"), ("Secret", "outrider-operator-key")}
    for document in documents:
        for secret in _credentials(document):
            if ("Secret", secret) not in there:
                yield f"{document['kind']}/{document['metadata']['name']}: there is no {secret}"
    for pod in pods(documents):
        wanted = [("ServiceAccount", pod.spec.get("serviceAccountName", "default"))]
        names = {*pod.claims}
        for volume in pod.spec.get("volumes", ()):
            names.add(volume["name"])
            sources = [key for key in volume if key != "name"]
            if len(sources) != 1:
                yield f"{pod.owner}: volume {volume['name']} is {' and '.join(sources)}"
            wanted += _volume(volume)
        for kind, name in wanted:
            if (kind, name) not in there and (kind, name) != ("ServiceAccount", "default"):
                yield f"{pod.owner}: there is no {kind}/{name}"
        for name, container in pod.containers():
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in names:
                    yield f"{name}: there is no volume {mount['name']}"


def _credentials(document: Document) -> Iterator[str]:
    """Secrets that Prometheus shows to whom it scrapes, or believes."""
    if document["kind"] != "PodMonitor":
        return
    for endpoint in document["spec"]["podMetricsEndpoints"]:
        tls = endpoint.get("tlsConfig", {})
        named = [tls[key]["secret"] for key in ("ca", "cert") if key in tls]
        named += [tls[key] for key in ("keySecret",) if key in tls]
        named += [endpoint[key]["credentials"] for key in ("authorization",) if key in endpoint]
        yield from (secret["name"] for secret in named)


def _volume(volume: Document) -> list[tuple[str, str]]:
    if "configMap" in volume:
        return [("ConfigMap", volume["configMap"]["name"])]
    if "secret" in volume:
        return [("Secret", volume["secret"]["secretName"])]
    if "persistentVolumeClaim" in volume:
        return [("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])]
    return []


def _hardening(pod: Pod) -> Iterator[str]:
    """What the standard "restricted" asks of a pod; of Outrider's processes also to have no token
    of the API server's and not to write to their images."""
    ours = any(True for _ in pod.processes())
    context = pod.spec.get("securityContext", {})
    if not context.get("runAsNonRoot") or context.get("runAsUser", 1) == 0:
        yield f"{pod.owner}: may run as root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield f"{pod.owner}: no seccomp profile"
    if ours and pod.spec.get("automountServiceAccountToken") is not False:
        yield f"{pod.owner}: mounts a token"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(key):
            yield f"{pod.owner}: {key}"
    for name, container in pod.containers():
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{name}: may gain privileges"
        if "ALL" not in own.get("capabilities", {}).get("drop", ()):
            yield f"{name}: keeps capabilities"
        if ours and own.get("readOnlyRootFilesystem") is not True:
            yield f"{name}: writes to its image"


def _container(container: Document) -> Iterator[str]:
    name, colon, tag = container["image"].rpartition("/")[2].partition(":")
    if (not colon or tag == "latest") and "@" not in name:
        yield f"image {container['image']} has no version"
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in ("cpu", "memory"):
        if name not in requests:
            yield f"requests no {name}"
    if "memory" not in limits:
        yield "has no limit of memory"
    try:
        for name in requests.keys() & limits.keys():
            if quantity(requests[name]) > quantity(limits[name]):
                yield f"requests more {name} than its limit"
        for text in (*requests.values(), *limits.values()):
            quantity(text)
    except ValueError as error:
        yield str(error)
    ports = container.get("ports", [])
    names = [port.get("name", "") for port in ports]
    if any(not 0 < len(name) <= 15 for name in names) or len({*names}) != len(names):
        yield f"names of ports: {names}"


def _probes(process: str, container: Document) -> Iterator[str]:
    ports = {port["containerPort"] for port in container.get("ports", ())}
    ports |= {port["name"] for port in container.get("ports", ())}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind)
        if probe is None:
            yield f"no {kind}"
            continue
        handlers = [key for key in ("grpc", "httpGet", "tcpSocket", "exec") if key in probe]
        if len(handlers) != 1:
            yield f"{kind}: one handler, not {handlers}"
        elif handlers != ["exec"] and probe[handlers[0]]["port"] not in ports:
            yield f"{kind}: there is no port {probe[handlers[0]]['port']}"
        if "grpc" in probe and not probe["grpc"].get("service"):
            yield f"{kind}: no service"
    startup = container.get("startupProbe", {})
    waits = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
    if process != "router" and waits < 300:
        yield f"startupProbe: {waits} s do not cover loading and warm-up"


def _scalers(documents: list[Document]) -> Iterator[str]:
    there = {(d["kind"], d["metadata"]["name"]) for d in documents}
    for document in documents:
        spec, where = document.get("spec", {}), f"{document['kind']}/{document['metadata']['name']}"
        # Its definition takes it.
        if spec.get("leaderWorkerTemplate", {}).get("size", 1) < 1:
            yield f"{where}: groups of nobody"
        if document["kind"] not in ("HorizontalPodAutoscaler", "ScaledObject"):
            continue
        low = spec.get("minReplicas", spec.get("minReplicaCount", 1))
        high = spec.get("maxReplicas", spec.get("maxReplicaCount", 100))
        if not 1 <= low <= high:
            yield f"{where}: {low} to {high} replicas"
        target = spec["scaleTargetRef"]
        if (target["kind"], target["name"]) not in there:
            yield f"{where}: there is no {target['kind']}/{target['name']}"


def scales_down_blindly(scalers: list[Document]) -> Iterator[str]:
    """Where KEDA takes no answer of Prometheus's for no work; by the scaled object's target."""
    for spec in scalers:
        name = spec["scaleTargetRef"]["name"]
        fallback = spec.get("fallback", {})
        if fallback.get("behavior") != "currentReplicasIfHigher":
            yield f"{name}: sets replicas to {fallback.get('replicas')} when it sees nothing"
        for trigger in spec["triggers"]:
            if trigger["metadata"].get("ignoreNullValues") != "false":
                yield f"{name}: {trigger['name']}: no series is a zero"


def outlives(authority: Document, certificates: Iterable[Document]) -> bool:
    """Whether every certificate stays valid when cert-manager renews the authority that signed it:
    the authority keeps its key, and is renewed earlier before its end than a certificate lasts."""
    spec = authority["spec"]
    left_h = _hours(spec["renewBefore"])
    lasts_h = [_hours(certificate["spec"]["duration"]) for certificate in certificates]
    return spec["privateKey"]["rotationPolicy"] == "Never" and left_h > max(lasts_h)


def _hours(duration: str) -> int:
    return int(duration.removesuffix("h"))


def pre_stop_s(container: Document) -> float:
    """What a container's preStop takes."""
    hook = container.get("lifecycle", {}).get("preStop", {})
    return float(hook.get("sleep", {}).get("seconds", 0))


def config_of(documents: list[Document], pod: Pod, container: Document) -> str:
    """The text of the file that a container's --config names. Raises LookupError."""
    arguments = container["args"]
    path = arguments[arguments.index("--config") + 1]
    folder, _, name = path.rpartition("/")
    mount = next(m for m in container["volumeMounts"] if m["mountPath"] == folder)
    volume = next(v for v in pod.spec["volumes"] if v["name"] == mount["name"])
    wanted = volume["configMap"]["name"]
    for document in documents:
        if document["kind"] == "ConfigMap" and document["metadata"]["name"] == wanted:
            text = document["data"][name]
            assert isinstance(text, str)
            return text
    raise LookupError(f"no ConfigMap {wanted}")
