"""Prometheus metrics of a drafter, and the statistics in `DrafterInfo`."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WINDOW = 256


class DrafterMetrics:
    """All metrics of one drafter in one registry. Each metric is written by one thread only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._recent_ms: deque[float] = deque(maxlen=_WINDOW)
        registry = self.registry
        self.sessions = Gauge(
            "outrider_drafter_sessions",
            "Sessions for which this drafter drafts at present",
            registry=registry,
        )
        self.connections = Gauge(
            "outrider_drafter_connections", "Connected verifiers", registry=registry
        )
        self.verdicts = Counter("outrider_drafter_verdicts", "Verdicts received", registry=registry)
        self.proposals = Counter(
            "outrider_drafter_proposals", "Proposals made", ["method"], registry=registry
        )
        self.draft_tokens = Counter(
            "outrider_drafter_draft_tokens",
            "Draft tokens of all proposals",
            ["method"],
            registry=registry,
        )
        self.no_proposal = Counter(
            "outrider_drafter_no_proposal",
            "Requested drafts that could not be made",
            ["method"],
            registry=registry,
        )
        self.lost_sessions = Counter(
            "outrider_drafter_lost_sessions",
            "Running sessions for which the drafter has stopped drafting, by reason",
            ["reason"],
            registry=registry,
        )
        self.device_losses = Counter(
            "outrider_drafter_device_losses",
            "Times that the GPU failed; the process exits after the first",
            registry=registry,
        )
        self.ignored_messages = Counter(
            "outrider_drafter_ignored_messages",
            "Messages of verifiers that were ignored, by reason",
            ["reason"],
            registry=registry,
        )
        self.connects = Counter(
            "outrider_drafter_connects",
            "Connections to verifiers and failed attempts, by outcome: connected, refused, "
            "unreachable, lost (an open connection ended), failed (internal error)",
            ["outcome"],
            registry=registry,
        )
        self.dropped_proposals = Counter(
            "outrider_drafter_dropped_proposals",
            "Messages with proposals that were dropped because the connection was slow or gone",
            registry=registry,
        )
        self._add_look_ahead()
        self.draft_seconds = Histogram(
            "outrider_drafter_draft_seconds",
            "Time to draft for a batch of sessions, after their verdicts were read",
            ["method"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.batch_sessions = Histogram(
            "outrider_drafter_batch_sessions",
            "Sessions drafted in one batch",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )

    def _add_look_ahead(self) -> None:
        registry = self.registry
        self.look_aheads = Counter(
            "outrider_drafter_look_aheads",
            "Look-ahead passes; each estimates the likely outcomes of proposals whose verdicts "
            "are awaited, and drafts for these outcomes",
            ["method"],
            registry=registry,
        )
        self.branches = Counter(
            "outrider_drafter_outcome_drafts",
            "Drafts made by look-ahead, each for one possible outcome, and sent before the verdict",
            ["method"],
            registry=registry,
        )
        self.outcomes = Counter(
            "outrider_drafter_outcomes",
            "Verdicts of sessions with look-ahead, by whether a draft for their outcome had been "
            "made: hit, miss",
            ["result"],
            registry=registry,
        )
        self.dropped_outcomes = Counter(
            "outrider_drafter_dropped_outcomes",
            "Outcomes that look-ahead had chosen, but whose draft was not made before the verdict "
            "arrived",
            registry=registry,
        )
        self.cut_look_aheads = Counter(
            "outrider_drafter_shortened_look_aheads",
            "Look-ahead work skipped for lack of time before the verdicts, by part: pass "
            "(proposals whose outcomes were not estimated), slice (estimated outcomes without a "
            "draft)",
            ["part"],
            registry=registry,
        )
        self.look_ahead_failures = Counter(
            "outrider_drafter_look_ahead_failures",
            "Look-ahead passes that failed; their sessions continue without look-ahead",
            ["method"],
            registry=registry,
        )
        self.look_ahead_seconds = Histogram(
            "outrider_drafter_look_ahead_seconds",
            "Time of one launch of look-ahead, by step: score (estimates the probabilities of "
            "outcomes), branch (drafts for the likeliest outcomes)",
            ["step"],
            buckets=_BUCKETS,
            registry=registry,
        )

    def init_series(self, methods: Iterable[str]) -> None:
        """Create all time series whose label values are known in advance, so that rates include the
        first event."""
        by_method = (
            self.proposals,
            self.draft_tokens,
            self.no_proposal,
            self.look_aheads,
            self.branches,
            self.look_ahead_failures,
            self.draft_seconds,
        )
        for method in methods:
            for metric in by_method:
                metric.labels(method)
        for result in ("hit", "miss"):
            self.outcomes.labels(result)
        for part in ("pass", "slice"):
            self.cut_look_aheads.labels(part)
        for step in ("score", "branch"):
            self.look_ahead_seconds.labels(step)

    def record_drafts(self, method: str, node_counts: NDArray[np.int64], seconds: float) -> None:
        """Count the proposals of a batch. `node_counts` [n]: draft tokens of each proposal, 0 where
        none was made; `seconds`: drafting time of the batch."""
        made = int(np.count_nonzero(node_counts))
        if made < len(node_counts):
            self.no_proposal.labels(method).inc(len(node_counts) - made)
        if made:
            self.proposals.labels(method).inc(made)
            self.draft_tokens.labels(method).inc(int(node_counts.sum()))
            self.draft_seconds.labels(method).observe(seconds)
            self._recent_ms.append(seconds * 1e3)

    @property
    def draft_ms_p50(self) -> float:
        """Median drafting time of the most recent batches in milliseconds, or 0 before the first
        batch."""
        recent = tuple(self._recent_ms)
        return statistics.median(recent) if recent else 0.0
