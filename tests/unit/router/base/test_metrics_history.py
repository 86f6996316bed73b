"""The history holds the last minutes of a router's metrics, and no more."""

from __future__ import annotations

import asyncio

import pytest
from outrider_router.base import metrics_history
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.metrics_history import (
    HISTORY_S,
    MAX_SAMPLED_VERIFIERS,
    PERIOD_S,
    MetricsHistory,
    MetricsSample,
    VerifierTotals,
    make_sample,
)

from outrider.wire.messages import SpecStats


def sample_of(metrics: RouterMetrics, *, time_s: float = 0.0, verifiers: int = 0) -> MetricsSample:
    totals = {str(place): VerifierTotals(SpecStats(), 0) for place in range(verifiers)}
    return make_sample(metrics, time_s=time_s, running=2, waiting=1, verifiers=totals)


def test_failures_are_no_cancelled_or_invalid_requests() -> None:
    metrics = RouterMetrics()
    for outcome in ("stop_token", "cancelled", "INVALID_ARGUMENT", "UNAVAILABLE"):
        metrics.record_request_end(outcome, 0.1, 0.5, 5, 0.6)
    sample = sample_of(metrics)
    assert (sample.totals["requests"], sample.totals["errors"]) == (4, 2)
    assert sample.totals["failed_requests"] == 1
    assert sum(sample.latencies["time_per_output_token"]) == 4


def test_refusals_are_told_by_reason() -> None:
    metrics = RouterMetrics()
    metrics.refusals.labels("QUEUE_FULL").inc(3)
    assert sample_of(metrics).refusals["QUEUE_FULL"] == 3


def test_a_sample_of_a_large_fleet_is_bounded() -> None:
    sample = sample_of(RouterMetrics(), verifiers=MAX_SAMPLED_VERIFIERS + 9)
    assert len(sample.verifiers) == MAX_SAMPLED_VERIFIERS


async def test_old_samples_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RouterMetrics()
    taken: list[MetricsSample] = []

    def read() -> MetricsSample:
        taken.append(sample_of(metrics, time_s=float(len(taken))))
        return taken[-1]

    most = round(HISTORY_S / PERIOD_S) + 1
    history = MetricsHistory(read)
    assert len(history.samples) == 1
    monkeypatch.setattr(metrics_history, "PERIOD_S", 0.0)
    history.start()
    while len(taken) < most + 5:
        await asyncio.sleep(0)
    await history.stop()
    assert history.samples == tuple(taken[-most:])
