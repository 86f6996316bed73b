"""What the processes export, read from their registries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from outrider_drafter.metrics import DrafterMetrics as DrafterMetrics
from outrider_router.api.fleet_metrics import FleetMetrics
from outrider_router.api.vllm_metrics import VllmMetrics
from outrider_router.base.metrics import RouterMetrics
from outrider_verifier.server.metrics import VerifierMetrics as VerifierMetrics
from prometheus_client import CollectorRegistry

from outrider.process_metrics import ProcessMetrics
from outrider.wire.inference import ServerInfo

INFO = ServerInfo(
    version="", protocol_version=1, queued=0, queue_bound=0, running=0, verifiers=(), drafters=()
)
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Family:
    """One metric as a process exports it."""

    name: str
    """A counter's with `_total`."""
    kind: str
    text: str

    @property
    def samples(self) -> set[str]:
        """Names of its samples."""
        base = self.name.removesuffix("_total")
        return {base + suffix for suffix in SUFFIXES[self.kind]}


def process_families() -> list[Family]:
    return _families(ProcessMetrics().registry)


def router_families() -> list[Family]:
    metrics = RouterMetrics()
    metrics.registry.register(FleetMetrics(lambda: INFO, lambda: (0, 0)))
    return _families(metrics.registry)


def vllm_families() -> list[Family]:
    registry = CollectorRegistry()
    registry.register(VllmMetrics(RouterMetrics(), lambda: INFO, lambda: "m"))
    return _families(registry)


def verifier_families() -> list[Family]:
    return _families(VerifierMetrics(dict, lambda: defaultdict(float)).registry)


def drafter_families() -> list[Family]:
    return _families(DrafterMetrics().registry)


def sample_names() -> set[str]:
    """Names of all samples of the three processes."""
    families = (*process_families(), *router_families(), *verifier_families(), *drafter_families())
    return {name for family in families for name in family.samples}


def table(families: Iterable[Family]) -> str:
    """The rows of the documentation's table."""
    rows = (f"| `{f.name}` | {f.kind} | {f.text.rstrip('.')} |" for f in families)
    return "\n".join(rows)


def _families(registry: CollectorRegistry) -> list[Family]:
    found = [
        Family(m.name + "_total" * (m.type == "counter"), m.type, m.documentation)
        for m in registry.collect()
    ]
    return sorted(found, key=lambda family: family.name)
