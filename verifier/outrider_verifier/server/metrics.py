"""Prometheus metrics of a verifier, and the rolling medians that `VerifierInfo` reports.

A round is one batched forward pass of the target. A session round is one decoding session's share
of a round; prefill does not count. If look-ahead is on, a session round is a *hit* if its proposal
arrived before the proposal's prefix was committed, *fresh* if the proposal arrived later, and a
*miss* if it has no proposal.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.wire.messages import MemoryKind, SpecStats
from outrider_verifier.state.effects import RoundReport
from outrider_verifier.state.preemption_mode import PreemptionMode

if TYPE_CHECKING:
    # It imports Triton, which a verifier on a CPU can do without.
    from outrider.engine.device.exchange.exchange_times import ExchangedRound

WINDOW = 512
"""Number of recent rounds of which the medians are computed."""
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_IDLE_BUCKETS = (25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 0.001, 0.002, 0.005)
_EXCHANGE_BUCKETS = (
    *(10e-6, 15e-6, 20e-6, 25e-6, 30e-6, 40e-6, 50e-6, 75e-6),
    *(100e-6, 150e-6, 200e-6, 500e-6, 0.001, 0.002, 0.005, 0.01, 0.05),
)
_PARTS = ("forward", "accept", "draft", "other", "wait")
"""Parts into which the time of a round is split. The time of the feature projection is in none of
them."""
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
    "sessions": "Sessions opened",
    "finished": "Sessions finished by a stop token or at their maximum length",
    "cancelled": "Sessions that were cancelled or closed before their end",
    "failed": "Sessions ended by an error",
    "rounds": "Rounds run",
    "invalid_outputs": "Sessions ended because the model gave no finite logit",
    "failed_rounds": "Rounds that raised an error",
    "device_losses": "Times that the GPU failed; the process exits after the first",
    "emitted_tokens": "Tokens emitted",
    "prefill_tokens": "Tokens prefilled, including recomputation after preemption",
    "prefix_cache_query_tokens": (
        "Tokens looked up in the prefix cache when a session gets KV blocks"
    ),
    "prefix_cache_hit_tokens": "Tokens whose KV was found in the prefix cache",
    "prefix_kv_comparisons": (
        "KV blocks compared with the cached KV of the same prefix (a debugging option)"
    ),
    "prefix_kv_differences": "Compared KV blocks that were not bitwise equal to the cached ones",
    "proposed_tokens": "Draft tokens verified",
    "accepted_tokens": "Draft tokens accepted",
    "fallback_rounds": (
        "Rounds in which a session wanted a draft and had none, summed over sessions"
    ),
    "empty_proposal_rounds": (
        "Rounds whose proposal had no draft token, because the drafter had nothing to propose (an "
        "n-gram lookup without a match); they are no fallback rounds; summed over sessions"
    ),
    "sessions_lost_by_drafters": (
        "Sessions for which their drafter reported that it has stopped drafting"
    ),
    "sessions_moved": "Running sessions moved to another drafter, or to none",
    "moves_refused": "Requests to move a running session to another drafter that could not be met",
    "proposal_timeouts": "Times that a session waited for a proposal until the proposal timeout",
    "paused_rounds": (
        "Rounds in which the planner had turned a session's speculation off, summed over sessions"
    ),
    "look_ahead_rounds": (
        "Rounds of sessions with look-ahead that had a draft or wanted one: hits, fresh rounds, "
        "and rounds without a draft; summed over sessions"
    ),
    "hit_rounds": (
        "Hits: rounds of sessions with look-ahead whose proposal arrived before the previous "
        "round ended"
    ),
    "hit_accepted_tokens": "Draft tokens accepted in hits (see outrider_verifier_hit_rounds_total)",
    "fresh_rounds": (
        "Fresh rounds: rounds of sessions with look-ahead whose proposal arrived after the "
        "previous round ended"
    ),
    "fresh_accepted_tokens": (
        "Draft tokens accepted in fresh rounds (see outrider_verifier_fresh_rounds_total)"
    ),
    "speculation_paused": "Times that the planner turned a session's speculation off",
    "draft_recoveries": (
        "Sessions prefilled again so that they get drafts through the device exchange"
    ),
    "device_exchange_rounds": "Rounds that verified drafts of the device exchange",
    "device_exchange_late_rounds": (
        "Rounds that waited for drafts of the device exchange and ran without them, because they "
        "were late"
    ),
    "device_exchange_hits": (
        "Verified drafts of the device exchange that were made by look-ahead, for the outcome "
        "that the previous round then had"
    ),
    "speculation_resumed": "Times that the planner turned a session's speculation on again",
    "look_ahead_started": "Times that the planner turned a session's look-ahead on",
    "look_ahead_ended": "Times that the planner turned a session's look-ahead off",
    "messages_invalid": "Messages of drafters and routers that failed validation",
    "drafters_attached": "Drafter connections accepted",
    "drafters_lost": "Drafter connections that ended",
    "drafters_stalled": (
        "Times that a drafter was declared stalled, because it sent no proposal at all within a "
        "proposal timeout"
    ),
    "drafters_disconnected_flooding": (
        "Drafters disconnected because they sent far more proposals than requested"
    ),
    "drafters_overflowed": "Drafters disconnected because they did not read their messages",
    "routers_overflowed": "Routers disconnected because they did not read their messages",
    "commands_refused": (
        "Requests and proposals refused because too many were waiting for the engine thread"
    ),
}
_GAUGES = {
    "sessions_running": "Running sessions: those that have KV blocks",
    "sessions_waiting": "Sessions that wait for KV blocks: preempted or not yet started",
    "swapped_bytes": "Host memory of the KV of preempted sessions that were swapped out",
    "kv_blocks": "KV blocks in all",
    "kv_blocks_free": "KV blocks that no session uses",
    "kv_cache_usage_ratio": "Share of the KV blocks in use",
    "prefix_blocks": "KV blocks in the prefix cache, including those in use",
    "prefix_feature_bytes": (
        "Host memory of the features (target hidden states for EAGLE heads) of blocks in the "
        "prefix cache"
    ),
    "drafters_connected": "Drafters connected",
    "pending_proposals": "Proposals stored for later rounds",
    "feature_bytes": (
        "Host memory of the features (target hidden states for EAGLE heads) of open sessions"
    ),
}


class RoundMedians:
    """Rolling medians over the recent rounds without prefill. Asyncio thread only."""

    def __init__(self) -> None:
        self._total: deque[float] = deque(maxlen=WINDOW)
        self._forward: deque[float] = deque(maxlen=WINDOW)
        self._overhead: deque[float] = deque(maxlen=WINDOW)
        self._hit_idle: deque[float] = deque(maxlen=WINDOW)

    def add_report(self, report: RoundReport) -> None:
        """Record a round. Rounds with prefill are ignored, because their times depend on the
        prompts."""
        if report.prefill_tokens:
            return
        self._total.append(report.total_s)
        self._forward.append(report.forward_s)
        self._overhead.append(report.overhead_s)
        if report.hit_idle_s is not None:
            self._hit_idle.append(report.hit_idle_s)

    @property
    def round_ms(self) -> float:
        """Median wall time of a round, in milliseconds."""
        return _median_ms(self._total)

    @property
    def forward_ms(self) -> float:
        """Median time of the target's forward pass, in milliseconds."""
        return _median_ms(self._forward)

    @property
    def overhead_ms(self) -> float:
        """Median time, in milliseconds, in which no model ran. It is measured over a round and the
        wait before it."""
        return _median_ms(self._overhead)

    @property
    def hit_idle_us(self) -> float:
        """Median idle time before a round whose sessions all have hits, in microseconds."""
        return _median_ms(self._hit_idle) * 1000.0


def stats_of(counters: Mapping[str, int]) -> SpecStats:
    """Return the speculation statistics summed over all sessions. The acceptance by depth is empty,
    because the verifier does not count it."""

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
    """Yield the counters of preempted sessions and of sessions that resumed."""
    preemptions = CounterMetricFamily(
        "outrider_preemptions",
        "Sessions preempted, by kind: swap (KV copied to host memory and back), recompute (KV "
        "computed again)",
        None,
        ["kind"],
    )
    for mode in PreemptionMode:
        preemptions.add_metric([mode.value], float(counts.get(f"preemptions_{mode.value}", 0)))
    yield preemptions
    resumed = CounterMetricFamily(
        "outrider_resumed_sessions",
        "Sessions that run again after an interruption, by cause: preemption",
        None,
        ["cause"],
    )
    resumed.add_metric(["preemption"], float(counts.get("resumed_preemption", 0)))
    yield resumed


def _median_ms(window: deque[float]) -> float:
    return statistics.median(window) * 1000.0 if window else 0.0


class VerifierMetrics(Collector):
    """Collector of a verifier's metrics. Histograms are updated after each round; counters and
    gauges are read when Prometheus scrapes them."""

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
            "Time of a round by part: forward (target), accept (acceptance), draft (in-process "
            "drafter), other, wait (for proposals, before the round); the part of an EAGLE head "
            "that reads features in the verifier is left out",
            ["part"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._parts = {part: self._round.labels(part) for part in _PARTS}
        self._rows = Histogram(
            "outrider_verifier_round_rows",
            "Tokens in a round's forward pass: prompt tokens, the last token of each session, and "
            "draft tokens (on a GPU with their padding)",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            registry=self.registry,
        )
        self._hit_idle = Histogram(
            "outrider_verifier_hit_idle_seconds",
            "Time from the end of a round to the submission of the next, if all sessions of the "
            "next have hits (see outrider_verifier_hit_rounds_total)",
            buckets=_IDLE_BUCKETS,
            registry=self.registry,
        )
        self._exchange_idle = Histogram(
            "outrider_verifier_device_exchange_idle_seconds",
            "Idle time of the GPU before a round with drafts of the device exchange, without the "
            "time in which the drafter's kernels drafted",
            buckets=_EXCHANGE_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)

    def observe_report(self, report: RoundReport) -> None:
        """Add a round to the histograms and the medians."""
        self.medians.add_report(report)
        self._parts["forward"].observe(report.forward_s)
        self._parts["accept"].observe(report.accept_s)
        self._parts["draft"].observe(report.draft_s)
        self._parts["other"].observe(report.other_s)
        self._parts["wait"].observe(report.waited_s)
        self._rows.observe(report.rows)
        if report.hit_idle_s is not None:
            self._hit_idle.observe(report.hit_idle_s)

    def observe_exchange(self, rounds: Iterable[ExchangedRound]) -> None:
        """Add rounds whose drafts came through the device exchange. Any thread may call this."""
        for each in rounds:
            self._exchange_idle.observe(each.idle_s)

    def collect(self) -> Iterator[Metric]:
        """Yield the present values of all counters and gauges."""
        counts = self._counts()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(
                f"outrider_verifier_{name}", text, value=float(counts.get(name, 0))
            )
        proposals = CounterMetricFamily(
            "outrider_verifier_proposals",
            "Proposals by what became of them (label outcome): stored, replaced (a stored one, by "
            "a better draft), duplicate, stale (its prefix cannot occur any more), full (too many "
            "for a session), unknown (session not known), used (a stored one was verified)",
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
        exchange = GaugeMetricFamily(
            "outrider_verifier_device_exchange_open",
            "1 while a device exchange with a drafter is open, by the memory of its buffers: "
            "device, host; else 0",
            None,
            ["memory"],
        )
        for kind in MemoryKind:
            exchange.add_metric([kind.value], gauges[f"device_exchange_open_{kind.value}"])
        yield exchange

    def describe(self) -> Iterator[Metric]:
        """Yield nothing. The registry calls this when the collector is registered, before the state
        that `collect` reads exists."""
        return iter(())
