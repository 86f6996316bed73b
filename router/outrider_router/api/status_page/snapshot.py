"""Snapshot of the router's state as plain data, for the status page.

Totals only grow; the page computes differences.
"""

from __future__ import annotations

import time
from typing import Any

from outrider.wire.inference import DrafterSummary, VerifierSummary
from outrider.wire.messages import FinishReason, SpecStats, VerifierInfo
from outrider_router.api import server_status
from outrider_router.base.metrics import RouterMetrics
from outrider_router.requests.service import RouterService

_NO_ERRORS = {reason.value for reason in FinishReason}


def make_snapshot(service: RouterService) -> dict[str, Any]:
    """Return all data of the status page, in types that JSON has.

    Names of times end with their unit. `*_total` are sums since the router's start, or for a
    verifier since the verifier's start.
    """
    info = server_status.make_server_info(service)
    infos = {p.address: p.info for p in list(service.registry.verifiers.values())}
    return {
        "version": info.version,
        "time_s": time.time(),
        "models": [model.name for model in server_status.make_model_list(service)],
        "queued": info.queued,
        "queue_bound": info.queue_bound,
        "running": info.running,
        "totals": _totals(service.metrics),
        "verifiers": [_verifier(v, infos.get(v.address)) for v in info.verifiers],
        "drafters": [_drafter(d) for d in info.drafters],
    }


def _totals(metrics: RouterMetrics) -> dict[str, float]:
    ended = errors = 0.0
    for metric in metrics.requests.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                ended += sample.value
                errors += sample.value * (sample.labels["outcome"] not in _NO_ERRORS)
    rounds = {
        "rounds_total": metrics.rounds,
        "round_tokens_total": metrics.round_tokens,
        "drafts_total": metrics.drafts,
        "draft_tokens_total": metrics.draft_tokens,
        "accepted_tokens_total": metrics.accepted_tokens,
        "fallback_rounds_total": metrics.fallback_rounds,
        "generation_tokens_total": metrics.generation_tokens,
        "prompt_tokens_total": metrics.prompt_tokens,
        "failovers_total": metrics.failovers,
    }
    sums = {name: _value(counter) for name, counter in rounds.items()}
    return sums | {
        "requests_total": ended,
        "errors_total": errors,
        "first_tokens_total": metrics.time_to_first_token.count,
        "first_token_s_total": metrics.time_to_first_token.sum,
    }


def _value(counter: Any) -> float:
    """Return the value of a counter without labels."""
    samples = (s for metric in counter.collect() for s in metric.samples)
    return next((s.value for s in samples if s.name.endswith("_total")), 0.0)


def _verifier(summary: VerifierSummary, info: VerifierInfo | None) -> dict[str, Any]:
    return {
        "id": summary.verifier_id,
        "address": summary.address,
        "healthy": summary.healthy,
        "draining": summary.draining,
        "model": summary.model,
        "sessions": summary.sessions,
        "max_sessions": summary.max_sessions,
        "waiting_sessions": summary.waiting_sessions,
        "kv_total_blocks": summary.kv_total_blocks,
        "kv_free_blocks": summary.kv_free_blocks,
        "preemptions_total": summary.preemptions_swap + summary.preemptions_recompute,
        "planner": summary.planner,
        "in_process_methods": [method.value for method in summary.in_process_methods],
        "simulated_acceptance": summary.simulated_acceptance,
        "round_ms": info.round_ms_p50 if info is not None else 0.0,
        "forward_ms": info.forward_ms_p50 if info is not None else 0.0,
        "overhead_ms": info.overhead_ms_p50 if info is not None else 0.0,
        "hit_idle_us": summary.hit_idle_us_p50,
        "stats": _stats(summary.stats),
    }


def _stats(stats: SpecStats) -> dict[str, int]:
    return {
        "rounds_total": stats.rounds,
        "emitted_total": stats.emitted,
        "proposed_total": stats.proposed,
        "accepted_total": stats.accepted,
        "fallback_rounds_total": stats.fallback_rounds,
        "paused_rounds_total": stats.paused_rounds,
        "look_ahead_rounds_total": stats.look_ahead_rounds,
        "hit_rounds_total": stats.hit_rounds,
    }


def _drafter(summary: DrafterSummary) -> dict[str, Any]:
    return {
        "id": summary.drafter_id,
        "address": summary.address,
        "healthy": summary.healthy,
        "draining": summary.draining,
        "methods": [method.value for method in summary.methods],
        "sessions": summary.sessions,
        "handicap": summary.handicap,
        "links": [
            {
                "verifier": link.verifier_id,
                "sessions": link.sessions,
                "answer_ms": link.answer_ms,
                "quarantine": link.quarantine,
                "probe_in_s": link.probe_in_s,
            }
            for link in summary.links
        ],
    }
