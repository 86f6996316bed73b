"""Prometheus collector of the fleet: queue, verifiers and drafter links, read at every scrape.

Its counters are read from the verifiers, so they restart at zero when a verifier restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.wire.inference import DrafterSummary, ServerInfo, VerifierSummary

_VERIFIER_GAUGES: dict[str, tuple[str, Callable[[VerifierSummary], float]]] = {
    "sessions": ("Sessions that this verifier serves", lambda v: v.sessions),
    "max_sessions": (
        "Maximum number of sessions that this verifier serves",
        lambda v: v.max_sessions,
    ),
    "waiting_sessions": (
        "Sessions of this verifier that wait for KV blocks: preempted or not yet started",
        lambda v: v.waiting_sessions,
    ),
    "kv_cache_usage_ratio": (
        "Fraction of this verifier's KV cache blocks in use.",
        lambda v: kv_usage([v]),
    ),
    "prefix_found_ratio": (
        "Share of the tokens looked up in the prefix cache that were found, since this verifier's "
        "start",
        lambda v: v.prefix_cache_hit_tokens / max(1, v.prefix_cache_query_tokens),
    ),
    "draining": (
        "1 while this verifier drains and takes no new sessions, else 0.",
        lambda v: v.draining,
    ),
    "acceptance_ratio": (
        "Share of the verified draft tokens that were accepted, since this verifier's start",
        lambda v: v.stats.accepted / v.stats.proposed if v.stats.proposed else 0.0,
    ),
}


def kv_usage(verifiers: list[VerifierSummary]) -> float:
    """Return the fraction of the verifiers' KV-cache blocks that are in use; 0 without
    verifiers.
    """
    total = sum(v.kv_total_blocks for v in verifiers)
    free = sum(v.kv_free_blocks for v in verifiers)
    return 1.0 - free / total if total else 0.0


class FleetMetrics(Collector):
    """Prometheus collector of queue and session totals, and of the metrics `outrider_fleet_*`,
    which have one series for each verifier or for each connection between a verifier and a drafter.
    """

    def __init__(
        self, info: Callable[[], ServerInfo], desired: Callable[[], tuple[int, int]]
    ) -> None:
        """Create the collector. The scraping thread calls both functions. `info` returns the state
        of the fleet, and `desired` the numbers of verifiers and of drafters that should be healthy.
        """
        self._info = info
        self._desired = desired

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the healthy verifiers and drafters."""
        info = self._info()
        yield from _sums(info, *self._desired())
        yield _models(info)
        verifiers = [v for v in info.verifiers if v.healthy]
        for name, (text, value) in _VERIFIER_GAUGES.items():
            family = GaugeMetricFamily(f"outrider_fleet_{name}", text, labels=["verifier"])
            for verifier in verifiers:
                family.add_metric([verifier.verifier_id], float(value(verifier)))
            yield family
        yield _preemptions(verifiers)
        yield from _links([d for d in info.drafters if d.healthy])

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, because the state is not complete yet when the collector is registered."""
        return iter(())


def _sums(info: ServerInfo, verifiers: int, drafters: int) -> Iterator[Metric]:
    counts = {
        "requests_waiting": ("Requests in the router's queue.", info.queued),
        "queue_limit": (
            "Largest number of requests that may wait in the router's queue.",
            info.queue_bound,
        ),
        "fleet_verifiers": ("Verifiers that this router knows.", len(info.verifiers)),
        "fleet_desired_verifiers": (
            "Verifiers that should be healthy: those with an address now, or the largest number "
            "that were healthy at once, without those that stopped after a drain.",
            verifiers,
        ),
        "fleet_healthy_verifiers": (
            "Healthy verifiers",
            sum(v.healthy for v in info.verifiers),
        ),
        "fleet_drafters": ("Drafters that this router knows.", len(info.drafters)),
        "fleet_desired_drafters": (
            "Drafters that should be healthy: those with an address now, or the largest number "
            "that were healthy at once, without those that stopped after a drain.",
            drafters,
        ),
        "fleet_healthy_drafters": (
            "Healthy drafters that are attached to a healthy verifier",
            sum(d.healthy for d in info.drafters),
        ),
    }
    for name, (text, count) in counts.items():
        yield GaugeMetricFamily(f"outrider_{name}", text, count)


def _models(info: ServerInfo) -> Metric:
    family = GaugeMetricFamily(
        "outrider_model_info",
        "Always 1. The label is the name of the model that this router serves; absent until a "
        "verifier has been reached.",
        labels=["model"],
    )
    for model in sorted({verifier.model for verifier in info.verifiers if verifier.model}):
        family.add_metric([model], 1.0)
    return family


def _preemptions(verifiers: list[VerifierSummary]) -> Metric:
    family = CounterMetricFamily(
        "outrider_fleet_preemptions",
        "Sessions that this verifier preempted, by kind: swap (KV copied to host memory and "
        "back), recompute (KV computed again).",
        labels=["verifier", "kind"],
    )
    for verifier in verifiers:
        name = verifier.verifier_id
        family.add_metric([name, "swap"], float(verifier.preemptions_swap))
        family.add_metric([name, "recompute"], float(verifier.preemptions_recompute))
    return family


def _links(drafters: list[DrafterSummary]) -> Iterator[Metric]:
    names = ["verifier", "drafter"]
    sessions = GaugeMetricFamily(
        "outrider_fleet_link_sessions",
        "Sessions of this verifier for which this drafter drafts",
        labels=names,
    )
    answers = GaugeMetricFamily(
        "outrider_fleet_drafter_answer_seconds",
        "Recent mean time from the end of a round to the arrival of the drafter's proposals at "
        "the verifier",
        labels=names,
    )
    quarantine = GaugeMetricFamily(
        "outrider_fleet_drafter_quarantined",
        "1 while the drafter is in quarantine, where it gets no sessions of this verifier except "
        "to test it, else 0",
        labels=names,
    )
    for drafter in drafters:
        for link in drafter.links:
            labels = [link.verifier_id, drafter.drafter_id]
            sessions.add_metric(labels, float(link.sessions))
            answers.add_metric(labels, link.answer_ms / 1e3)
            quarantine.add_metric(labels, float(bool(link.quarantine)))
    yield from (sessions, answers, quarantine)
