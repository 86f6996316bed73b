"""Snapshot of the router's state as plain data, for the status page."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from outrider.wire.inference import DrafterSummary, VerifierSummary
from outrider.wire.messages import SpecStats
from outrider_router.api import server_status
from outrider_router.api.status_page.figures import (
    WINDOW_S,
    Interval,
    last_interval,
    make_curves,
    make_figures,
    ratio,
)
from outrider_router.api.status_page.problems import RouterState, find_problems
from outrider_router.api.status_page.speculation_text import describe_fleet, describe_verifier
from outrider_router.base.metrics_history import MetricsSample
from outrider_router.fleet.peers import VerifierPeer
from outrider_router.requests.service import RouterService


def make_snapshot(service: RouterService, *, with_history: bool = False) -> dict[str, Any]:
    """Return all data of the status page, in types that JSON has.

    Names of times end with their unit. `*_total` are sums since the router's start, or for a
    verifier since the verifier's start. `with_history` adds the curves of the last minutes.
    """
    info = server_status.make_server_info(service)
    registry, history = service.registry, service.history
    peers = list(registry.verifiers.values())
    now = history.read_now()
    recent = last_interval(history.samples, now, WINDOW_S)
    problems = find_problems(
        RouterState(
            info=info,
            verifiers=peers,
            drafters=list(registry.drafters.values()),
            desired_verifiers=registry.desired_verifiers,
            desired_drafters=registry.desired_drafters,
            recent=recent,
            is_draining=service.is_draining,
            is_journal_failing=_is_set(service.metrics.journal_failing),
            are_keys_failing=_is_set(service.metrics.keys_failing),
        )
    )
    state = {
        "version": info.version,
        "time_s": time.time(),
        "models": [model.name for model in server_status.make_model_list(service)],
        "problems": [asdict(problem) for problem in problems],
        "queued": info.queued,
        "queue_bound": info.queue_bound,
        "running": info.running,
        "window_s": recent.seconds,
        "figures": make_figures(history.samples, now),
        "totals": _totals(service, now),
        "speculation": describe_fleet(info, recent),
        "verifiers": [
            _verifier(summary, peer, recent)
            for summary, peer in zip(info.verifiers, peers, strict=True)
        ],
        "drafters": [_drafter(d) for d in info.drafters],
    }
    if with_history:
        state["history"] = make_curves(history.samples, now)
    return state


def _totals(service: RouterService, now: MetricsSample) -> dict[str, float]:
    first = service.metrics.time_to_first_token
    return {f"{name}_total": value for name, value in now.totals.items()} | {
        "first_tokens_total": first.count,
        "first_token_s_total": first.sum,
    }


def _is_set(gauge: Any) -> bool:
    """Return whether a gauge without labels is not 0."""
    return any(sample.value for metric in gauge.collect() for sample in metric.samples)


def _verifier(summary: VerifierSummary, peer: VerifierPeer, recent: Interval) -> dict[str, Any]:
    info = peer.info
    stats = recent.verifier_stats(summary.address)
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
        "speculation": describe_verifier(summary, stats),
        "recent": {
            "acceptance": ratio(stats.accepted, stats.proposed),
            "tokens_per_round": ratio(stats.emitted, stats.rounds),
            "look_ahead_hits": ratio(stats.hit_rounds, stats.look_ahead_rounds),
            "without_draft": ratio(stats.fallback_rounds, stats.rounds),
        },
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
