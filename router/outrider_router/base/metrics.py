"""Prometheus metrics of the router. Each router has its own registry, so that tests do not share
state.

Speculation counters are updated once per message of session events, by sums over its columns.
Histograms are updated once per message, not once per value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    TARGET_ONLY,
    FinishReason,
    SessionEvents,
)
from outrider_router.base.reasons import FailoverCause, ForwardOutcome, MoveReason, QuarantineReason
from outrider_router.base.slow_readers import SLOW_READER

MAX_SINGLE_VALUES: Final = 8
"""Largest number of values that `observe_values` counts one by one. For so few values this is
faster than with an array.
"""


class BatchHistogram(Collector):
    """Histogram that adds many values in one call. Only one thread may write to it."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """Create and register the histogram.

        `buckets` are the upper bounds in ascending order, without infinity.
        """
        self._name, self._text = name, text
        self._bounds = [float(bound) for bound in buckets]
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0
        registry.register(self)

    @property
    def bucket_counts(self) -> tuple[int, ...]:
        """Number of observed values in each bucket; the last bucket has no upper bound."""
        return tuple(self._counts.tolist())

    @property
    def count(self) -> int:
        """Number of observed values."""
        return int(self._counts.sum())

    @property
    def sum(self) -> float:
        """Sum of the observed values."""
        return self._sum

    def observe_values(self, *values: float) -> None:
        """Add values to the histogram."""
        if len(values) <= MAX_SINGLE_VALUES:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
                self._sum += value
            return
        array = np.array(values, dtype=np.float64)
        places = np.searchsorted(self._bounds, array)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(array.sum())

    def collect(self) -> Iterator[Metric]:
        """Yield the current state of the histogram."""
        bounds = [*map(str, self._bounds), "+Inf"]
        counts = np.cumsum(self._counts).tolist()
        yield HistogramMetricFamily(
            self._name,
            self._text,
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=self._sum,
        )


_ERRORS: tuple[type[OutriderError], ...] = (
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ResourceExhaustedError,
    UnavailableError,
)
LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Bounds in seconds for waits and durations of whole requests, up to 30 minutes."""
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class RouterMetrics:
    """All metrics of the router itself. Attributes are objects of prometheus_client, or
    `BatchHistogram`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._requests()
        self._surviving()
        self._overload()
        self._access()
        self._speculation()
        self._fleet()
        self._begin_at_zero()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"outrider_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"outrider_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> BatchHistogram:
        return BatchHistogram(f"outrider_{name}", text, buckets, self.registry)

    def _requests(self) -> None:
        self.requests = self._counter(
            "requests_total",
            "Requests that ended, by outcome: the finish reason, or the error code in lower case.",
            "outcome",
        )
        self.requests_running = self._gauge("requests_running", "Requests that are being served.")
        self.queue_depth = self._gauge(
            "queue_depth", "Requests waiting in the queue, by priority.", "priority"
        )
        self.kv_reserved_tokens = self._gauge(
            "kv_reserved_tokens",
            "Tokens of KV cache that the sessions placed on verifiers are expected to need.",
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of all requests.")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens sent to clients.")
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "Time that requests wait in the admission queue.",
            LATENCY_BUCKETS,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time from one round of a session to its next, divided by the tokens of the later "
            "round.",
            TOKEN_BUCKETS,
        )
        self.request_duration = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the last token.", LATENCY_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Time from the first to the last token, divided by the tokens after the first.",
            TOKEN_BUCKETS,
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens",
            "Prompt tokens of each request that was placed on a verifier.",
            LENGTH_BUCKETS,
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens",
            "Tokens of the answer of each request that ended.",
            LENGTH_BUCKETS,
        )

    def _surviving(self) -> None:
        self.resumed_streams = self._counter(
            "resumed_streams_total", "Streams that clients resumed."
        )
        self.forwarded_streams = self._counter(
            "forwarded_streams_total",
            "Requests that a client resumed here and that were looked for on the other routers, by "
            "outcome: found, not_found, unreachable (a router that may have it did not answer).",
            "outcome",
        )
        self.restored_requests = self._counter(
            "restored_requests_total",
            "Requests found in the journal at the start, by state: running (continued), ended "
            "(answer kept for its client), dropped (too old or not usable).",
            "state",
        )
        self.journal_failing = self._gauge(
            "journal_failing", "1 while the journal cannot be written."
        )
        self.journal_damaged = self._counter(
            "journal_damaged_records_total", "Damaged parts of the journal that were skipped."
        )

    def _overload(self) -> None:
        self.refusals = self._counter(
            "refusals_total",
            "Requests that were refused or ended because of overload, by reason: RATE_LIMITED "
            "(rate of a tenant), QUEUE_FULL, DISPLACED (from the full queue by a request that "
            "precedes it), SLOW_READER (the client did not read), KEY_RATE_LIMITED (rate of an "
            "API key), KEY_BUSY (too many requests of an API key in progress).",
            "reason",
        )
        self.preempting_placements = self._counter(
            "preempting_placements_total",
            "Sessions placed on a full verifier, which then preempts sessions of lower priority.",
        )
        self.tenant_requests = self._counter(
            "tenant_requests_total",
            "Requests that passed the rate limits of their tenant, by tenant; tenants without "
            "limits of their own in the configuration count as default.",
            "tenant",
        )
        self.tenant_tokens = self._counter(
            "tenant_tokens_total",
            "Prompt and answer tokens of finished requests, by tenant.",
            "tenant",
        )

    def _access(self) -> None:
        self.access_refusals = self._counter(
            "access_refusals_total",
            "Calls of the router's gRPC and HTTP APIs that were refused, by reason: NO_KEY, "
            "WRONG_KEY, NOT_OPERATOR (the key is not an operator's), WRONG_ROLE (of the TLS "
            "certificate).",
            "reason",
        )
        self.tls_handshakes = self._counter(
            "tls_handshakes_total",
            "TLS handshakes started on gRPC ports, including those that failed.",
        )
        self.keys_failing = self._gauge(
            "api_keys_failing",
            "1 while the file of API keys is invalid; the last valid keys apply.",
        )

    def _speculation(self) -> None:
        self.rounds = self._counter(
            "rounds_total", "Verification rounds that emitted tokens, summed over sessions."
        )
        self.round_tokens = self._counter(
            "round_tokens_total", "Tokens emitted by verification rounds."
        )
        self.drafts = self._counter(
            "spec_decode_num_drafts_total",
            "Verification rounds with a draft, summed over sessions.",
        )
        self.draft_tokens = self._counter(
            "spec_decode_num_draft_tokens_total", "Draft tokens that were verified."
        )
        self.accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."
        )
        self.accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Draft tokens that were accepted, by position in the draft (0: the first draft token).",
            "position",
        )
        self.fallback_rounds = self._counter(
            "fallback_rounds_total",
            "Rounds in which a session wanted a draft and had none, summed over sessions.",
        )
        self.undrafted_rounds = self._counter(
            "undrafted_rounds_total",
            "Those of outrider_fallback_rounds_total in which the session had no drafter, because "
            "none was usable or none has the session's draft method.",
        )
        self.target_only_rounds = self._counter(
            "target_only_rounds_total",
            "Rounds of sessions under the rejection rule in which the target-only rule was used, "
            "because the draft probabilities were missing.",
        )
        self.look_ahead_rounds = self._counter(
            "look_ahead_rounds_total",
            "Rounds in which a session with look-ahead had a draft or wanted one, summed over "
            "sessions.",
        )
        self.look_ahead_drafted_rounds = self._counter(
            "look_ahead_drafted_rounds_total",
            "Rounds of sessions with look-ahead that had a draft, by kind: hit (the proposal "
            "arrived before the previous round ended), fresh (it arrived later).",
            "kind",
        )
        self.look_ahead_accepted = self._counter(
            "look_ahead_accepted_tokens_total",
            "Draft tokens accepted in rounds of sessions with look-ahead, by kind of round: hit "
            "(the proposal arrived before the previous round ended), fresh (it arrived later).",
            "kind",
        )

    def _fleet(self) -> None:
        self.verifier_up = self._gauge(
            "verifier_up", "1 while this verifier accepts sessions, else 0.", "verifier"
        )
        self.verifier_losses = self._counter(
            "verifier_losses_total",
            "Times that the router lost the connection to this verifier or found it unhealthy.",
            "verifier",
        )
        self.failovers = self._counter(
            "failovers_total",
            "Times that a request lost its session and continued in another one.",
        )
        self.resumed_sessions = self._counter(
            "resumed_sessions_total",
            "Sessions opened to continue a running request, by the cause for which it lost the "
            "one before: verifier_lost, draining (the verifier stops), failed (error in the "
            "session), refused (no capacity), router_lost.",
            "cause",
        )
        self.drafter_up = self._gauge(
            "drafter_up",
            "1 while this drafter is reachable and attached to a verifier, else 0.",
            "drafter",
        )
        self.drafter_losses = self._counter(
            "drafter_losses_total",
            "Times that this drafter ended, failed or lost its connections.",
            "drafter",
        )
        self.drafter_detached_sessions = self._counter(
            "drafter_detached_sessions_total",
            "Times that a running session lost its drafter.",
        )
        self.session_moves = self._counter(
            "session_moves_total",
            "Running sessions moved to another drafter or to none, by reason (label why): lost "
            "(the session's drafter was lost or it had none), quarantined (its drafter was), "
            "drained (its drafter is being removed or stops), probe (the session tests a "
            "quarantined drafter), balance (drafters had unequal loads).",
            "why",
        )
        self.drafter_quarantines = self._counter(
            "drafter_quarantines_total",
            "Times that a drafter was quarantined (gets no sessions of a verifier for a time), by "
            "reason: slow (late proposals), silent (no proposals), wrong (invalid messages).",
            "reason",
        )

    def _begin_at_zero(self) -> None:
        """Create the series of known label values at 0, so that rates include the first event."""
        codes = (error.code.lower() for error in _ERRORS)
        known: dict[Counter | Gauge, Iterable[str]] = {
            self.requests: (*FinishReason, *codes),
            self.queue_depth: ("0",),
            self.restored_requests: ("running", "ended", "dropped"),
            self.forwarded_streams: ForwardOutcome,
            self.refusals: ("RATE_LIMITED", "QUEUE_FULL", "DISPLACED", SLOW_READER),
            self.accepted_per_position: ("0",),
            self.look_ahead_drafted_rounds: ("hit", "fresh"),
            self.look_ahead_accepted: ("hit", "fresh"),
            self.resumed_sessions: FailoverCause,
            self.session_moves: MoveReason,
            self.drafter_quarantines: QuarantineReason,
        }
        for metric, values in known.items():
            for value in values:
                metric.labels(value)

    def _add_ahead(self, flags: NDArray[np.uint8], accepted: NDArray[np.uint16]) -> None:
        ahead = flags & LOOKED_AHEAD > 0
        hit = ahead & (flags & LOOK_AHEAD_HIT > 0)
        fresh = ahead & (flags & (LOOK_AHEAD_HIT | FALLBACK) == 0)
        self.look_ahead_rounds.inc(int(np.count_nonzero(ahead)))
        for kind, rows in (("hit", hit), ("fresh", fresh)):
            self.look_ahead_drafted_rounds.labels(kind).inc(int(np.count_nonzero(rows)))
            self.look_ahead_accepted.labels(kind).inc(int(accepted[rows].sum()))

    def record_request_end(
        self, outcome: str, first: float | None, last: float, tokens: int, duration_s: float
    ) -> None:
        """Count a request that ended.

        `outcome` is its finish reason or error code; the label is in lower case. `first` and `last`
        are the clock times in seconds of its first and last output token; `first` is None if there
        is none. `tokens` is the number of its output tokens, and `duration_s` the time since its
        arrival.
        """
        self.requests.labels(outcome.lower()).inc()
        self.request_duration.observe_values(duration_s)
        self.request_generation_tokens.observe_values(tokens)
        if first is not None and tokens > 1:
            self.time_per_output_token.observe_values((last - first) / (tokens - 1))

    def record_events(self, events: SessionEvents) -> None:
        """Add the rounds that a message of session events reports to the speculation counters."""
        rounds = (events.round_ids > 0) & (events.counts > 0)
        self.rounds.inc(int(rounds.sum()))
        self.round_tokens.inc(int(events.counts[rounds].sum()))
        flags = events.flags[rounds]
        self.fallback_rounds.inc(int(np.count_nonzero(flags & FALLBACK)))
        undrafted = flags & (FALLBACK | DRAFTER_ATTACHED) == FALLBACK
        self.undrafted_rounds.inc(int(np.count_nonzero(undrafted)))
        self.target_only_rounds.inc(int(np.count_nonzero(flags & TARGET_ONLY)))
        self.drafts.inc(int(np.count_nonzero(events.proposed[rounds])))
        self.draft_tokens.inc(int(events.proposed[rounds].sum()))
        accepted = events.accepted[rounds]
        if (flags & LOOKED_AHEAD).any():
            self._add_ahead(flags, accepted)
        if not accepted.any():
            return
        self.accepted_tokens.inc(int(accepted.sum()))
        # A round that accepted d nodes accepted one at each depth up to d.
        reached = np.cumsum(np.bincount(accepted)[:0:-1])[::-1]
        for position, count in enumerate(reached.tolist()):
            self.accepted_per_position.labels(str(position)).inc(count)
