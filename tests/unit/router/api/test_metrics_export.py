"""What a router exports beside its counters: the fleet, and names of vLLM if asked for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider_router.config import MetricsCompat
from outrider_router.requests.service import RouterService
from prometheus_client import generate_latest

from outrider.wire.messages import LOOK_AHEAD_HIT, SessionEvents, SpecStats
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import collect, text_request
from tests.waiting import until

LABELS = {"model_name": "fake", "engine": "0"}


def rounds(proposed: list[int], accepted: list[int]) -> SessionEvents:
    """One message of events: so many rounds of as many sessions."""
    counts = np.array(accepted, np.uint32) + np.uint32(1)
    return SessionEvents(
        handles=np.arange(len(proposed), dtype=np.uint32),
        round_ids=np.arange(1, len(proposed) + 1, dtype=np.uint32),
        counts=counts.astype(np.uint32),
        tokens=np.zeros(int(counts.sum()), np.int32),
        finish_reasons=np.zeros(len(proposed), np.uint8),
        flags=np.full(len(proposed), LOOK_AHEAD_HIT, np.uint8),
        proposed=np.array(proposed, np.uint16),
        accepted=np.array(accepted, np.uint16),
    )


def page_as_vllm_bench_reads_it(service: RouterService) -> tuple[int, int, int, dict[int, int]]:
    """Drafts, draft tokens, accepted tokens, the latter by position: by prefix and substring."""
    drafts = draft_tokens = accepted = 0
    per_position: dict[int, int] = {}
    for line in generate_latest(service.metrics.registry).decode().splitlines():
        if line.startswith("#") or not line.startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_accepted_tokens_per_pos" in line:
            position = int(line.split('position="')[1].split('"')[0])
            per_position[position] = per_position.get(position, 0) + value
        elif "num_drafts" in line:
            drafts += value
        elif "num_draft_tokens" in line:
            draft_tokens += value
        elif "num_accepted_tokens" in line:
            accepted += value
    return drafts, draft_tokens, accepted, per_position


async def test_vllm_names_are_exported_only_when_asked_for(
    router: RouterService, tmp_path: Path
) -> None:
    assert b"vllm:" not in generate_latest(router.metrics.registry)
    fleet = {"v": FakeVerifier()}
    async with running_router(tmp_path, fleet, metrics_compat=MetricsCompat.VLLM) as other:
        assert b"vllm:num_requests_running{" in generate_latest(other.metrics.registry)


async def test_a_tool_that_reads_vllm_finds_our_acceptance(tmp_path: Path) -> None:
    fleet = {"v": FakeVerifier()}
    async with running_router(tmp_path, fleet, metrics_compat=MetricsCompat.VLLM) as router:
        router.metrics.record_events(rounds([4, 4, 0, 2], [3, 0, 0, 2]))
        assert page_as_vllm_bench_reads_it(router) == (3, 10, 5, {0: 2, 1: 2, 2: 1})


async def test_vllm_names_say_what_our_own_say(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.change_info(
        kv_free_blocks=64,
        preemptions_swap=2,
        preemptions_recompute=3,
        prefix_cache_query_tokens=80,
        prefix_cache_hit_tokens=20,
    )
    config = {"metrics_compat": MetricsCompat.VLLM}
    async with running_router(tmp_path, {"v": verifier}, **config) as router:
        await collect(router, text_request(max_tokens=10))
        expected = {
            "prompt_tokens_total": 3,
            "generation_tokens_total": 10,
            "time_to_first_token_seconds_count": 1,
            "inter_token_latency_seconds_count": 9,
            "request_time_per_output_token_seconds_count": 1,
            "request_queue_time_seconds_count": 1,
            "e2e_request_latency_seconds_count": 1,
            "request_prompt_tokens_sum": 3,
            "request_generation_tokens_sum": 10,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.75,
            "num_preemptions_total": 5,
            "prefix_cache_queries_total": 80,
            "prefix_cache_hits_total": 20,
        }
        for name, value in expected.items():
            assert sample(router, f"vllm:{name}", **LABELS) == value, name
        for reason, value in {"length": 1, "stop": 0, "abort": 0, "error": 0}.items():
            ended = {**LABELS, "finished_reason": reason}
            assert sample(router, "vllm:request_success_total", **ended) == value
        assert sample(router, "outrider_generation_tokens_total") == 10


async def test_the_model_keeps_its_name_when_the_fleet_is_lost(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    config = {"metrics_compat": MetricsCompat.VLLM}
    async with running_router(tmp_path, {"v": verifier}, **config) as router:
        assert sample(router, "vllm:num_requests_running", **LABELS) == 0
        verifier.lost.set()
        await until(lambda: router.registry.any_verifier_info() is None)
        page = generate_latest(router.metrics.registry).decode()
        assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in page


@pytest.mark.parametrize("kind", ["swap", "recompute"])
async def test_the_fleet_is_exported_as_it_was_last_seen(
    router: RouterService, verifier: FakeVerifier, kind: str
) -> None:
    verifier.change_info(
        kv_free_blocks=192,
        max_sessions=5,
        waiting_sessions=2,
        stats=SpecStats(rounds=9, emitted=20, proposed=8, accepted=6),
        **{f"preemptions_{kind}": 4},
    )

    def said(name: str, **more: str) -> float:
        return sample(router, f"outrider_fleet_{name}", verifier="v0", **more)

    await until(lambda: said("max_sessions") == 5)
    assert said("waiting_sessions") == 2
    assert said("kv_cache_usage_ratio") == 0.25
    assert said("acceptance_ratio") == 0.75
    assert said("draining") == 0
    assert said("preemptions_total", kind=kind) == 4
    verifier.lost.set()
    await until(lambda: router.registry.any_verifier_info() is None)
    assert b'outrider_fleet_sessions{verifier="v0"}' not in generate_latest(router.metrics.registry)


async def test_links_say_how_soon_a_drafter_answers(tmp_path: Path) -> None:
    fleet = {"v": (verifier := FakeVerifier())}
    async with running_router(tmp_path, fleet, {"d": FakeDrafter(fleet)}) as router:
        (attached,) = (await verifier.info()).drafters
        changed = replace(attached, answer_ms=2.5, sessions=3)
        verifier.change_info(drafters=(changed,))
        labels = {"verifier": "v0", "drafter": attached.drafter_id}

        def said(name: str) -> float:
            return sample(router, f"outrider_fleet_{name}", **labels)

        await until(lambda: said("drafter_answer_seconds") == 0.0025)
        assert said("link_sessions") == 3
        assert said("drafter_quarantined") == 0
