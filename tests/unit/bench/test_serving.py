"""Service-level benchmarks over the tiny model on a CPU: the driver and what it measures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from outrider_bench.gpu.lossless import compare
from outrider_bench.gpu.placement import split_round
from outrider_bench.gpu.support.load_driver import (
    ServiceWave,
    SessionStreamLog,
    drive_sessions,
    random_prompts,
)
from outrider_bench.gpu.support.random_model import (
    LLAMA_8B,
    TINY,
    RandomSource,
    head_shape,
    load_in_process_drafter,
    random_head,
    random_target,
)
from outrider_bench.gpu.support.services import (
    COLOCATED,
    FUSED,
    INPROC,
    PLAIN,
    SEPARATE,
    LoadedModels,
    ServingSetup,
    serve_models,
    uses_device_engine,
)
from outrider_bench.gpu.support.timeline import VERIFY
from outrider_bench.gpu.support.trace import TrackSpan
from outrider_bench.gpu.support.widening import weight_bytes
from outrider_bench.report import percentiles
from outrider_verifier.state.effects import RoundReport

from outrider.engine.model_loader import load_target
from outrider.errors import InvalidRequestError
from outrider.wire.messages import SpecStats


@pytest.fixture
def tiny(tiny_target: Path, tiny_head: Path) -> LoadedModels:
    """The tiny model on the host's path."""
    target = load_target(tiny_target, kv_tokens=4096)
    head, projection = load_in_process_drafter(tiny_head, target)
    return LoadedModels(
        name="tiny",
        target=target,
        head=head,
        projection=projection,
        drafter_model=tiny_target,
        drafter_head=tiny_head,
    )


def _wave(
    models: LoadedModels, setup: ServingSetup, concurrency: int | None = None
) -> tuple[ServiceWave, int]:
    async def measure() -> tuple[ServiceWave, int]:
        async with serve_models(models, setup) as running:
            prompts = random_prompts(4, 12, models.target.vocab_size)
            wave = await drive_sessions(running, prompts, 10, concurrency=concurrency)
            return wave, len(running.reports)

    return asyncio.run(measure())


@pytest.mark.parametrize("placement", [INPROC, SEPARATE])
def test_drafters_change_no_token(tiny: LoadedModels, placement: str) -> None:
    if uses_device_engine(tiny):
        pytest.skip("this machine cannot pack weights")
    setup = ServingSetup(max_sessions=4, max_tokens=64)
    plain, rounds = _wave(tiny, setup)
    assert rounds > 0 and plain.mean_emitted == 1.0
    drafted, _ = _wave(tiny, ServingSetup(placement=placement, max_sessions=4, max_tokens=64))
    assert [s.tokens for s in drafted.streams] == [s.tokens for s in plain.streams]
    assert sum(s.stats.proposed for s in drafted.streams) > 0
    pool = tiny.target.pool
    assert pool.free_blocks == pool.total_blocks


@pytest.mark.parametrize("placement", [FUSED, COLOCATED])
def test_a_head_in_the_process_changes_no_token(
    tiny_target: Path, tiny_head: Path, placement: str
) -> None:
    """The device engine, by the torch twins of its kernels."""
    target = load_target(tiny_target, kv_tokens=4096, packed=False)
    head, projection = load_in_process_drafter(tiny_head, target)
    models = LoadedModels(name="tiny", target=target, head=head, projection=projection)
    plain, _ = _wave(models, ServingSetup(max_sessions=4, max_tokens=64))
    own, _ = _wave(models, ServingSetup(placement=placement, max_sessions=4, max_tokens=64))
    assert [s.tokens for s in own.streams] == [s.tokens for s in plain.streams]
    assert sum(s.stats.proposed for s in own.streams) > 0
    assert target.pool.free_blocks == target.pool.total_blocks


def test_simulated_acceptance_reaches_the_mean_that_was_asked_for() -> None:
    target = random_target(TINY, dtype=torch.float32, device=torch.device("cpu"), kv_tokens=2048)
    head, projection = random_head(head_shape(TINY, 300), target.embedding)
    models = LoadedModels(name="random", target=target, head=head, projection=projection)
    setup = ServingSetup(
        placement=COLOCATED, draft_length=3, max_sessions=4, max_tokens=256, simulated="2.6"
    )

    async def measure() -> ServiceWave:
        async with serve_models(models, setup) as running:
            return await drive_sessions(running, random_prompts(4, 12, TINY.vocab_size), 200)

    assert asyncio.run(measure()).mean_emitted == pytest.approx(2.6, abs=0.25)


def test_concurrency_is_kept(tiny: LoadedModels) -> None:
    wave, _ = _wave(
        tiny, ServingSetup(placement=PLAIN, max_sessions=2, max_tokens=64), concurrency=2
    )
    assert wave.concurrency == 2 and len(wave.streams) == 4
    summary = wave.summary()
    assert summary["tokens"] == 40 and summary["sessions"] == 4


def test_figures_of_a_wave() -> None:
    """Two sessions, rounds of 10 ms, two tokens a round."""
    streams = []
    for start in (0.1, 0.2):
        stream = SessionStreamLog(0.0, stats=SpecStats(rounds=4, emitted=8))
        stream.arrivals = [(start, 1)] + [(start + 0.01 * i, 2) for i in range(1, 31)]
        stream.tokens = list(range(61))
        streams.append(stream)
    wave = ServiceWave(streams, 2)
    assert wave.steady == pytest.approx((0.2, 0.4))
    assert wave.round_ms == pytest.approx(10.0)
    assert wave.mean_emitted == 2.0
    assert wave.steady_tokens_per_s == pytest.approx(2 * 2 / 0.01, rel=0.06)
    summary = wave.summary()
    assert summary["ttft_ms"] == percentiles([100.0, 200.0])
    assert summary["per_token_ms"] == percentiles([5.0, 5.0])
    assert summary["tokens_per_s"] == pytest.approx(122 / 0.5, abs=0.01)


def test_the_split_of_a_round_takes_full_rounds_without_prompts() -> None:
    def report(**other: float) -> RoundReport:
        parts = {"total_s": 0.005, "forward_s": 0.004, "waited_s": 0.002, "drafted_s": 0.0015}
        sizes = {"rows": 4, "verify_rows": 1, "prefill_tokens": 0, "emitted": 2}
        fixed = {"accept_s": 0.0, "project_s": 0.0}
        return RoundReport(**{**parts, **sizes, **fixed, **other})  # type: ignore[arg-type]

    reports = [report(), report(prefill_tokens=9, total_s=9.0), report(verify_rows=2, total_s=9.0)]
    spans = [TrackSpan(VERIFY, "verify", 7.0 * i, 7.0 * i + 4.5) for i in range(4)]
    split, overhead = split_round(reports, spans, batch=1)
    expected = {"draft": 1.5, "transfer": 0.5, "verify": 4.5, "other": 0.5}
    assert split == pytest.approx(expected)
    assert overhead == pytest.approx(1000.0)


def test_differences_are_explained_by_the_gap_of_the_two_tokens(tiny: LoadedModels) -> None:
    prompts = [[5, 6, 7], [8, 9, 10]]
    case = compare(tiny.target, prompts, [[1, 2, 3], [4, 4]], [[1, 2, 3], [4, 5]])
    assert case["identical"] == 1 and case["of"] == 2
    assert case["differences"][0]["at"] == 1 and case["largest_gap"] > 0
    shorter = compare(tiny.target, prompts[:1], [[1, 2, 3]], [[1, 2]])
    assert not shorter["all_near_ties"]


def test_a_random_model_has_the_shape_and_differs_by_layer() -> None:
    target = random_target(TINY, dtype=torch.float32, device=torch.device("cpu"), kv_tokens=64)
    config = head_shape(TINY, 300)
    head, projection = random_head(config, target.embedding)
    assert head.fingerprint == projection.fingerprint
    assert bool((head.target_ids.diff() > 0).all()) and len(head.target_ids) == 300
    weights = [layer.down.weight for layer in target.weights.layers]  # type: ignore[attr-defined]
    assert len(weights) == TINY.num_layers
    assert not torch.equal(weights[0], weights[1])
    assert weight_bytes(LLAMA_8B) == pytest.approx(15.01e9, rel=1e-3)
    source = RandomSource(TINY, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(InvalidRequestError, match="no tensor"):
        source.get("model.layers.0.mlp.router.weight")
