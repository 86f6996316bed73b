"""Prometheus metrics of a verifier, and the rolling medians that `VerifierInfo` reports."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.wire.messages import SpecStats
from outrider_verifier.state.effects import RoundReport
from outrider_verifier.state.preemption_mode import PreemptionMode

WINDOW = 512
"""Rounds over which the medians run."""
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_IDLE_BUCKETS = (25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 0.001, 0.002, 0.005)
_PARTS = ("forward", "accept", "draft", "other", "wait")
_PROPOSALS = (
    "used",
    "stored",
    "replaced",
    "duplicate",
    "stale",
    "full",
    "unknown",
)
_COUNTERS = {
    "sessions": "Sessions taken in",
    "finished": "Sessions that ended by a stop token or their length",
    "cancelled": "Sessions closed before their end",
    "failed": "Sessions ended by an error",
    "rounds": "Rounds run",
    "invalid_outputs": "Sessions ended because the model gave no finite logit",
    "failed_rounds": "Rounds that raised an error",
    "device_losses": "Devices that stopped working; the process ends with the first",
    "emitted_tokens": "Tokens emitted",
    "prefill_tokens": "Prompt tokens processed",
    "prefix_cache_query_tokens": "Tokens of sessions that were let in without K/V",
    "prefix_cache_hit_tokens": "Of these, tokens whose K/V other sessions had left behind",
    "proposed_tokens": "Draft nodes verified",
    "accepted_tokens": "Draft nodes accepted",
    "fallback_rounds": "Session rounds without a proposal although one was wanted",
    "sessions_lost_by_drafters": "Sessions that a drafter could not follow any more",
    "sessions_moved": "Sessions that were given to another drafter while they ran",
    "moves_refused": "Sessions that their routers wanted moved and that could not be",
    "ngram_fallback_rounds": "Session rounds that verified a lookup in the session's own text",
    "ngram_fallback_accepted_tokens": "Tokens of these lookups that stood",
    "proposal_timeouts": "Session rounds whose wait for a proposal ran into the proposal timeout",
    "paused_rounds": "Session rounds decoded plainly because the planner had found that faster",
    "look_ahead_rounds": "Session rounds with look-ahead that used a proposal or wanted one",
    "hit_rounds": "Look-ahead rounds whose proposal had come before its prefix did",
    "hit_accepted_tokens": "Draft nodes accepted in hit rounds",
    "fresh_rounds": "Look-ahead rounds whose proposal was made for a prefix that was there",
    "fresh_accepted_tokens": "Draft nodes accepted in fresh rounds",
    "speculation_paused": "Sessions whose speculation the planner paused",
    "features_dropped_sessions": "Sessions whose features were dropped by the planner",
    "speculation_resumed": "Sessions whose speculation the planner resumed",
    "look_ahead_started": "Sessions that the planner had drafted for ahead of their verdicts",
    "look_ahead_ended": "Sessions that the planner had drafted for in lock-step again",
    "messages_invalid": "Messages of drafters and routers that failed validation",
    "drafters_attached": "Drafter connections accepted",
    "drafters_lost": "Drafter connections that ended",
    "drafters_stalled": "Times that nobody waited any longer for a drafter that said nothing",
    "drafters_disconnected_flooding": "Drafters disconnected because they flooded the verifier",
    "drafters_overflowed": "Drafters disconnected because they did not read",
    "routers_overflowed": "Routers disconnected because they did not read",
    "commands_refused": "Requests and proposals refused because the engine thread was behind",
}
_GAUGES = {
    "sessions_running": "Sessions with K/V",
    "sessions_waiting": "Sessions without K/V: preempted, or not begun",
    "swapped_bytes": "Host memory that the K/V of preempted sessions takes",
    "kv_blocks": "K/V blocks that sessions can have",
    "kv_blocks_free": "K/V blocks that nobody has",
    "kv_cache_usage_ratio": "Share of the K/V blocks in use",
    "prefix_blocks": "K/V blocks that sessions may begin with, those in use included",
    "prefix_feature_bytes": "Host memory that the features of these take",
    "drafters_connected": "Drafters attached now",
    "pending_proposals": "Proposals held for rounds to come",
    "feature_bytes": "Host memory that the features of live sessions take",
}


class RoundMedians:
    """Rolling medians of the recent rounds, milliseconds; asyncio thread only."""

    def __init__(self) -> None:
        self._total: deque[float] = deque(maxlen=WINDOW)
        self._forward: deque[float] = deque(maxlen=WINDOW)
        self._overhead: deque[float] = deque(maxlen=WINDOW)
        self._hit_idle: deque[float] = deque(maxlen=WINDOW)

    def add_report(self, report: RoundReport) -> None:
        """Take in a round; rounds with prompt tokens are left out, they measure the prompt."""
        if report.prefill_tokens:
            return
        self._total.append(report.total_s)
        self._forward.append(report.forward_s)
        self._overhead.append(report.overhead_s)
        if report.hit_idle_s is not None:
            self._hit_idle.append(report.hit_idle_s)

    @property
    def round_ms(self) -> float:
        """Median wall time of a round."""
        return _median_ms(self._total)

    @property
    def forward_ms(self) -> float:
        """Median time in the target's forward."""
        return _median_ms(self._forward)

    @property
    def overhead_ms(self) -> float:
        """Median time of a round outside the two models' forwards."""
        return _median_ms(self._overhead)

    @property
    def hit_idle_us(self) -> float:
        """Median time, microseconds, between a round's end and a round of hits alone."""
        return _median_ms(self._hit_idle) * 1000.0


def stats_of(counters: Mapping[str, int]) -> SpecStats:
    """Speculation of all sessions; depths are not counted here."""

    def count(name: str) -> int:
        return counters.get(name, 0)

    return SpecStats(
        rounds=count("session_rounds"),
        emitted=count("session_round_tokens"),
        proposed=count("proposed_tokens"),
        accepted=count("accepted_tokens"),
        fallback_rounds=count("fallback_rounds"),
        target_only_rounds=count("target_only_rounds"),
        paused_rounds=count("paused_rounds"),
        look_ahead_rounds=count("look_ahead_rounds"),
        hit_rounds=count("hit_rounds"),
        hit_accepted=count("hit_accepted_tokens"),
        fresh_rounds=count("fresh_rounds"),
        fresh_accepted=count("fresh_accepted_tokens"),
    )


def _preempted(counts: Mapping[str, int]) -> Iterator[Metric]:
    """Sessions that lost their K/V, and those that have it again."""
    preemptions = CounterMetricFamily(
        "outrider_preemptions", "Sessions preempted, by how they get their K/V back", None, ["kind"]
    )
    for way in PreemptionMode:
        preemptions.add_metric([way.value], float(counts.get(f"preemptions_{way.value}", 0)))
    yield preemptions
    resumed = CounterMetricFamily(
        "outrider_resumed_sessions",
        "Sessions that go on, by what had stopped them",
        None,
        ["cause"],
    )
    resumed.add_metric(["preemption"], float(counts.get("resumed_preemption", 0)))
    yield resumed


def _median_ms(window: deque[float]) -> float:
    return statistics.median(window) * 1000.0 if window else 0.0


class VerifierMetrics(Collector):
    """Histograms of round times; counts and gauges are read when scraped."""

    def __init__(
        self,
        counts: Callable[[], Mapping[str, int]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        self.registry = CollectorRegistry()
        self.medians = RoundMedians()
        self._counts = counts
        self._gauges = gauges
        self._round = Histogram(
            "outrider_verifier_round_seconds",
            "Time of a round by part",
            ["part"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._parts = {part: self._round.labels(part) for part in _PARTS}
        self._rows = Histogram(
            "outrider_verifier_round_rows",
            "Token rows of a round's forward",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            registry=self.registry,
        )
        self._hit_idle = Histogram(
            "outrider_verifier_hit_idle_seconds",
            "Time from the end of a round to the submission of the next one, where all are hits",
            buckets=_IDLE_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)

    def observe_report(self, report: RoundReport) -> None:
        """Take in a round."""
        self.medians.add_report(report)
        self._parts["forward"].observe(report.forward_s)
        self._parts["accept"].observe(report.accept_s)
        self._parts["draft"].observe(report.draft_s)
        self._parts["other"].observe(report.other_s)
        self._parts["wait"].observe(report.waited_s)
        self._rows.observe(report.rows)
        if report.hit_idle_s is not None:
            self._hit_idle.observe(report.hit_idle_s)

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges at this moment."""
        counts = self._counts()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(
                f"outrider_verifier_{name}", text, value=float(counts.get(name, 0))
            )
        proposals = CounterMetricFamily(
            "outrider_verifier_proposals",
            "Proposals received, by what became of them",
            None,
            ["outcome"],
        )
        for outcome in _PROPOSALS:
            proposals.add_metric([outcome], float(counts.get(f"proposals_{outcome}", 0)))
        yield proposals
        yield from _preempted(counts)
        gauges = self._gauges()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"outrider_verifier_{name}", text, gauges[name])

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read state that is still being built."""
        return iter(())
