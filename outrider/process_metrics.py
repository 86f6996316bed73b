"""Metrics that every process exports from its start: state, build, and use of CPU and memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import outrider

COMMIT_VARIABLE = "OUTRIDER_COMMIT"
"""Environment variable with the commit from which the process was built; images set it."""


class ProcessState(StrEnum):
    """Part of its life that a process is in."""

    LOADING = "loading"
    """The process reads its models and warms up; it does not serve yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """The process ends its sessions or requests before it stops."""


class ProcessMetrics:
    """Prometheus registry of a process, complete enough to be scraped while models load.

    A process serves `registry` as soon as it starts. What it builds later has registries of its
    own, which `add_registry` includes.
    """

    def __init__(self) -> None:
        """Create the registry. The state is `loading`."""
        self.registry = CollectorRegistry()
        self._state = Gauge(
            "outrider_process_state",
            "1 for the state that this process is in, 0 for the others: loading (reads its models "
            "and warms up), serving, draining (ends its work before it stops).",
            ["state"],
            registry=self.registry,
        )
        self.set_state(ProcessState.LOADING)
        build = Gauge(
            "outrider_build_info",
            "Always 1. The labels are the version of this process, and the commit from which it "
            "was built or an empty string if that is not known.",
            ["version", "commit"],
            registry=self.registry,
        )
        build.labels(outrider.__version__, os.environ.get(COMMIT_VARIABLE, "")).set(1)
        ProcessCollector(registry=self.registry)

    def set_state(self, state: ProcessState) -> None:
        """Export `state` as the process's state."""
        for each in ProcessState:
            self._state.labels(each.value).set(each is state)

    def add_registry(self, registry: CollectorRegistry) -> None:
        """Export the metrics of another registry, too. Their names must not occur in this one."""
        self.registry.register(_RegistryCollector(registry))


class _RegistryCollector(Collector):
    """Collector of the metrics in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()
