"""Figures and curves of the status page, computed from samples of the router's metrics. Pure.

Shares and percentiles are of the last `WINDOW_S` seconds, rates of the last `RATE_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from outrider.wire.messages import SpecStats
from outrider_router.base.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS
from outrider_router.base.metrics_history import MetricsSample

WINDOW_S: Final = 300.0
"""Time in seconds over which shares and percentiles are computed."""
RATE_S: Final = 10.0
"""Shortest time in seconds over which rates are computed."""
MIN_INTERVAL_S: Final = 1.0
"""Shortest time in seconds for which a curve has a value."""
_BOUNDS: Final[Mapping[str, Sequence[float]]] = {
    "time_to_first_token": LATENCY_BUCKETS,
    "time_per_output_token": TOKEN_BUCKETS,
    "inter_token_latency": TOKEN_BUCKETS,
}
_SPEC_COUNTERS: Final = (
    *("rounds", "emitted", "proposed", "accepted", "drafted_rounds", "fallback_rounds"),
    *("paused_rounds", "look_ahead_rounds", "hit_rounds"),
)


class Interval:
    """Growth of a router's metrics from one sample to a later one."""

    def __init__(self, earlier: MetricsSample, later: MetricsSample) -> None:
        self._earlier, self._later = earlier, later

    @property
    def seconds(self) -> float:
        """Length of the interval in seconds."""
        return self._later.time_s - self._earlier.time_s

    def growth(self, name: str) -> float:
        """Return by how much a counter of `MetricsSample.totals` grew."""
        return self._later.totals[name] - self._earlier.totals[name]

    def rate(self, name: str) -> float | None:
        """Return the growth of a counter per second; None for an interval without length."""
        return ratio(self.growth(name), self.seconds)

    def share(self, part: str, whole: str) -> float | None:
        """Return the growth of one counter divided by that of another; None if that did not
        grow.
        """
        return ratio(self.growth(part), self.growth(whole))

    def refusals(self) -> dict[str, int]:
        """Return the number of refused requests by reason, without reasons that did not occur."""
        grown = {
            reason: round(count - self._earlier.refusals.get(reason, 0.0))
            for reason, count in self._later.refusals.items()
        }
        return {reason: count for reason, count in grown.items() if count}

    def percentile_s(self, name: str, share: float) -> float | None:
        """Return a percentile, in seconds, of the values that a histogram of `LATENCIES` counted;
        None if it counted none. It is estimated within the bucket as Prometheus estimates it.
        """
        earlier, later = self._earlier.latencies[name], self._later.latencies[name]
        counts = [now - before for now, before in zip(later, earlier, strict=True)]
        return estimate_percentile(_BOUNDS[name], counts, share)

    def verifier_stats(self, address: str) -> SpecStats:
        """Return the speculation counters of a verifier over the interval. They are those since its
        start if it was restarted, or not sampled before.
        """
        later, earlier = self._later.verifiers.get(address), self._earlier.verifiers.get(address)
        if later is None:
            return SpecStats()
        now, before = later.stats, earlier.stats if earlier is not None else SpecStats()
        if any(getattr(now, name) < getattr(before, name) for name in _SPEC_COUNTERS):
            before = SpecStats()
        return SpecStats(**{n: getattr(now, n) - getattr(before, n) for n in _SPEC_COUNTERS})

    def preemptions(self, address: str) -> int:
        """Return the number of sessions that a verifier preempted; see `verifier_stats`."""
        later, earlier = self._later.verifiers.get(address), self._earlier.verifiers.get(address)
        now = later.preemptions if later is not None else 0
        before = earlier.preemptions if earlier is not None else 0
        return now if now < before else now - before


def last_interval(samples: Sequence[MetricsSample], now: MetricsSample, seconds: float) -> Interval:
    """Return the interval of the last `seconds` seconds before `now`. It begins at the newest of
    `samples` that is old enough, or at the oldest one.
    """
    old = [sample for sample in samples if sample.time_s <= now.time_s - seconds]
    return Interval(old[-1] if old else samples[0], now)


def ratio(part: float, whole: float) -> float | None:
    """Return a quotient, or None if `whole` is not positive."""
    return part / whole if whole > 0 else None


def estimate_percentile(
    bounds: Sequence[float], counts: Sequence[int], share: float
) -> float | None:
    """Return the value below which a `share` of the values of a histogram lies; None without
    values. `counts` has one more element than `bounds`, for values above the last bound.
    """
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    below = list(accumulate(counts, initial=0))
    place = next(i for i in range(len(counts)) if below[i + 1] >= wanted and counts[i])
    if place == len(bounds):
        return bounds[-1]
    lower = bounds[place - 1] if place else 0.0
    return lower + (bounds[place] - lower) * (wanted - below[place]) / counts[place]


def make_figures(samples: Sequence[MetricsSample], now: MetricsSample) -> dict[str, Any]:
    """Return the figures of the page's tiles; None stands for figures that have no value, as in an
    idle router.
    """
    recent, last = last_interval(samples, now, WINDOW_S), last_interval(samples, now, RATE_S)
    requests = recent.rate("requests")
    return {
        **_latencies(recent),
        "tokens_per_s": last.rate("generation_tokens"),
        "requests_per_min": None if requests is None else 60.0 * requests,
        "failed_share": recent.share("failed_requests", "requests"),
        "acceptance": recent.share("accepted_tokens", "draft_tokens"),
        "draft_tokens_per_draft": recent.share("draft_tokens", "drafts"),
        "accepted_per_draft": recent.share("accepted_tokens", "drafts"),
        "tokens_per_round": recent.share("round_tokens", "rounds"),
    }


def _latencies(interval: Interval) -> dict[str, float | None]:
    return {
        f"{name}_ms_p{percent}": _ms(interval.percentile_s(name, percent / 100.0))
        for name in ("time_to_first_token", "time_per_output_token")
        for percent in (50, 95)
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds


def make_curves(samples: Sequence[MetricsSample], now: MetricsSample) -> dict[str, Any]:
    """Return the history as columns: one value for each interval between two samples, oldest
    first. `ages_s` are the seconds since the end of each interval. The last interval ends now.
    """
    if now.time_s - samples[-1].time_s >= MIN_INTERVAL_S:
        samples = (*samples, now)
    intervals = [(later, Interval(earlier, later)) for earlier, later in pairwise(samples)]
    columns: dict[str, Callable[[Interval], float | None]] = {
        "tokens_per_s": lambda each: each.rate("generation_tokens"),
        "acceptance": lambda each: each.share("accepted_tokens", "draft_tokens"),
        "tokens_per_round": lambda each: each.share("round_tokens", "rounds"),
    }
    latencies = [_latencies(each) for _, each in intervals]
    return {
        "ages_s": [round(now.time_s - later.time_s, 1) for later, _ in intervals],
        "running": [later.running for later, _ in intervals],
        "waiting": [later.waiting for later, _ in intervals],
        **{
            name: [_rounded(value(each)) for _, each in intervals]
            for name, value in columns.items()
        },
        **{
            name: [_rounded(each[name]) for each in latencies]
            for name in _latencies(Interval(now, now))
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
