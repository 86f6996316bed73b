"""History of the router's metrics: samples of the last minutes, in memory.

The router takes the samples itself, so that whoever opens the status page after something went
wrong sees what happened before. Memory is bounded by the numbers of samples and of verifiers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from outrider.wire.messages import FinishReason, SpecStats, VerifierInfo
from outrider_router.base.metrics import RouterMetrics

PERIOD_S: Final = 10.0
"""Time in seconds between two samples."""
HISTORY_S: Final = 900.0
"""Time in seconds that the history covers."""
MAX_SAMPLED_VERIFIERS: Final = 64
"""Largest number of verifiers in a sample."""
FAILED_OUTCOMES: Final = frozenset(
    {"unavailable", "internal", "unknown", "failed_precondition", "aborted"}
)
"""Outcomes of requests that failed through no fault of the client; the alert OutriderErrors counts
the same ones.
"""
LATENCIES: Final = ("time_to_first_token", "time_per_output_token", "inter_token_latency")
"""Histograms in each sample, by their attributes of `RouterMetrics`."""
_COUNTERS: Final = (
    *("rounds", "round_tokens", "drafts", "draft_tokens", "accepted_tokens", "fallback_rounds"),
    *("undrafted_rounds", "generation_tokens", "prompt_tokens", "failovers"),
)
"""Counters without labels in each sample, by their attributes of `RouterMetrics`."""


class VerifierTotals(NamedTuple):
    """Counters of a verifier since its start."""

    stats: SpecStats
    preemptions: int

    @classmethod
    def of(cls, info: VerifierInfo) -> VerifierTotals:
        """Return the counters that a verifier reports."""
        return cls(info.stats, info.preemptions_swap + info.preemptions_recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """Metrics of a router at one time."""

    time_s: float
    """Monotonic time in seconds."""
    running: int
    waiting: int
    totals: Mapping[str, float]
    """Counters since the router's start: those of `RouterMetrics` without labels by their
    attributes, and `requests`, `errors`, `failed_requests`, `access_refusals`.
    """
    refusals: Mapping[str, float] = field(default_factory=dict)
    """Refused requests since the router's start, by reason."""
    latencies: Mapping[str, Sequence[int]]
    """Bucket counts of each histogram in `LATENCIES` since the router's start."""
    verifiers: Mapping[str, VerifierTotals] = field(default_factory=dict)
    """Counters of at most `MAX_SAMPLED_VERIFIERS` verifiers, by address."""


def make_sample(
    metrics: RouterMetrics,
    *,
    time_s: float,
    running: int,
    waiting: int,
    verifiers: Mapping[str, VerifierTotals],
) -> MetricsSample:
    """Return the present values of a router's metrics."""
    outcomes = _values(metrics.requests, "outcome")
    fine = {reason.value for reason in FinishReason}
    totals = {name: sum(_values(getattr(metrics, name), "").values()) for name in _COUNTERS}
    totals |= {
        "requests": sum(outcomes.values()),
        "errors": sum(count for outcome, count in outcomes.items() if outcome not in fine),
        "failed_requests": sum(outcomes.get(outcome, 0.0) for outcome in FAILED_OUTCOMES),
        "access_refusals": sum(_values(metrics.access_refusals, "reason").values()),
    }
    return MetricsSample(
        time_s=time_s,
        running=running,
        waiting=waiting,
        totals=totals,
        refusals=_values(metrics.refusals, "reason"),
        latencies={name: getattr(metrics, name).bucket_counts for name in LATENCIES},
        verifiers=dict(list(verifiers.items())[:MAX_SAMPLED_VERIFIERS]),
    )


def _values(counter: Any, label: str) -> dict[str, float]:
    """Return the values of a counter by one of its labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return {s.labels.get(label, ""): s.value for s in samples if s.name.endswith("_total")}


class MetricsHistory:
    """Takes a sample of a router's metrics every `PERIOD_S` seconds, and keeps those of the last
    `HISTORY_S` seconds. Use from one event loop.
    """

    def __init__(self, read: Callable[[], MetricsSample]) -> None:
        """Create a history with one sample. `read` returns a sample of the present metrics."""
        self._read = read
        self._samples = deque((read(),), maxlen=round(HISTORY_S / PERIOD_S) + 1)
        self._task: asyncio.Task[None] | None = None

    @property
    def samples(self) -> Sequence[MetricsSample]:
        """Samples of the past, oldest first; at least one."""
        return tuple(self._samples)

    def read_now(self) -> MetricsSample:
        """Return a sample of the present metrics, which is not kept."""
        return self._read()

    def start(self) -> None:
        """Start taking samples."""
        self._task = asyncio.create_task(self._run(), name="metrics-history")

    async def stop(self) -> None:
        """Stop taking samples. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self._samples.append(self._read())
