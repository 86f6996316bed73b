"""Exports the router's metrics under vLLM's names (`--metrics-compat vllm`).

Nothing is counted twice: at every scrape, series are read from the router's own metrics or state
and renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.errors import CancelledRequestError
from outrider.wire.inference import ServerInfo
from outrider.wire.messages import FinishReason
from outrider_router.api.fleet_metrics import kv_usage
from outrider_router.base.metrics import RouterMetrics

_ENGINE = "0"
"""Value of the label `engine`, with which vLLM numbers its engines. A router counts as one
engine.
"""
_FINISHED = {
    FinishReason.STOP_TOKEN.value: "stop",
    FinishReason.STOP_STRING.value: "stop",
    FinishReason.LENGTH.value: "length",
    CancelledRequestError.code.lower(): "abort",
}


class VllmMetrics(Collector):
    """Collector of `vllm:*` series, each with the labels model_name and engine."""

    def __init__(
        self,
        metrics: RouterMetrics,
        info: Callable[[], ServerInfo],
        model_name: Callable[[], str],
    ) -> None:
        """Create the collector.

        At each scrape `info` returns the state of the fleet and `model_name` the served model.
        """
        self._metrics = metrics
        self._info = info
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics in their current state."""
        labels = {"model_name": self._model_name(), "engine": _ENGINE}
        for name, source in self._renamed().items():
            for metric in source.collect():
                yield _as(metric, f"vllm:{name}", labels)
        yield self._finished_requests(labels)
        yield from _state(self._info(), labels)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, because the state is not complete yet when the collector is registered."""
        return iter(())

    def _renamed(self) -> Mapping[str, Collector]:
        own = self._metrics
        return {
            "spec_decode_num_drafts": own.drafts,
            "spec_decode_num_draft_tokens": own.draft_tokens,
            "spec_decode_num_accepted_tokens": own.accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": own.accepted_per_position,
            "prompt_tokens": own.prompt_tokens,
            "generation_tokens": own.generation_tokens,
            "time_to_first_token_seconds": own.time_to_first_token,
            "inter_token_latency_seconds": own.inter_token_latency,
            "request_time_per_output_token_seconds": own.time_per_output_token,
            "request_queue_time_seconds": own.queue_time,
            "e2e_request_latency_seconds": own.request_duration,
            "request_prompt_tokens": own.request_prompt_tokens,
            "request_generation_tokens": own.request_generation_tokens,
        }

    def _finished_requests(self, labels: Mapping[str, str]) -> Metric:
        counts: dict[str, float] = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        for metric in self._metrics.requests.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    counts[_FINISHED.get(sample.labels["outcome"], "error")] += sample.value
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason; vLLM does not have the reason error.",
            labels=[*labels, "finished_reason"],
        )
        for reason, count in counts.items():
            family.add_metric([*labels.values(), reason], count)
        return family


def _as(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """Return the samples of a metric under another name and with more labels."""
    renamed = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        if suffix != "_created":
            renamed.add_sample(name + suffix, {**labels, **sample.labels}, sample.value)
    return renamed


def _state(info: ServerInfo, labels: Mapping[str, str]) -> Iterator[Metric]:
    verifiers = [v for v in info.verifiers if v.healthy]
    gauges = {
        "num_requests_running": ("Sessions placed on verifiers.", info.running),
        "num_requests_waiting": ("Requests in the router's queue.", info.queued),
        "kv_cache_usage_perc": (
            "Share of the KV cache blocks in use, 0 to 1.",
            kv_usage(verifiers),
        ),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        gauge.add_metric(list(labels.values()), float(value))
        yield gauge
    counters = {
        "num_preemptions": (
            "Sessions that verifiers preempted.",
            sum(v.preemptions_swap + v.preemptions_recompute for v in verifiers),
        ),
        "prefix_cache_queries": (
            "Tokens looked up in the prefix cache.",
            sum(v.prefix_cache_query_tokens for v in verifiers),
        ),
        "prefix_cache_hits": (
            "Tokens found in the prefix cache.",
            sum(v.prefix_cache_hit_tokens for v in verifiers),
        ),
    }
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(labels))
        counter.add_metric(list(labels.values()), float(value))
        yield counter
