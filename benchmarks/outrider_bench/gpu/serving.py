"""End-to-end serving by placement and batch: tokens/s, time to first token, inter-token latency.

The widened model answers real chat prompts: its acceptance is real, and its times are those of a
large model. A wave has `REQUESTS` requests per concurrent session. An answer ends at its
end-of-turn token or at the limit of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.process_tuning import run_event_loop as run_loop
from outrider.spec.sampling import SamplingParams
from outrider_bench.gpu.plain import WARM_TOKENS, sized
from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.load_driver import ServiceWave, drive_sessions
from outrider_bench.gpu.support.services import (
    COLOCATED,
    FUSED,
    PLAIN,
    SEPARATE,
    LoadedModels,
    ServingSetup,
    serve_models,
)
from outrider_bench.prompts import is_loop

DRAFT_LENGTH = 3
REQUESTS = 2
"""Number of requests of a wave per concurrent session. A wave has at least four requests."""
BOTH = (32, 64)
"""Batch sizes at which fused drafting is compared with plain decoding."""


def run(bench: Bench) -> dict[str, object]:
    """Measure every placement at every batch size and return the result for the JSON file."""
    models = bench.widened()
    # A drafter process on the target's own device would show the cost of sharing it.
    own_device = (SEPARATE,) if torch.cuda.device_count() > 1 else ()
    placements = bench.placements(PLAIN, FUSED, COLOCATED, *own_device)
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for placement in placements:
        for batch, wave in waves(bench, models, placement, bench.batches).items():
            facts = describe_wave(wave)
            results.setdefault(placement, {})[str(batch)] = facts
            rows.append(
                (
                    placement,
                    batch,
                    facts["tokens_per_s"],
                    facts["requests_per_s"],
                    facts["ttft_ms"].get("p50"),
                    *(facts["itl_ms"].get(f"p{p}") for p in (50, 90, 99)),
                    facts["emitted_per_round"],
                )
            )
    headers = ("placement", "batch", "tokens/s", "requests/s", "TTFT p50", "ITL p50", "p90", "p99")
    show(f"serving, {models.name}, K = {DRAFT_LENGTH}, ms", (*headers, "emitted"), rows)
    return bench.result(
        "serving",
        models,
        draft_length=DRAFT_LENGTH,
        temperature=bench.args.temperature,
        output_tokens=bench.output_tokens,
        busy_polling_cores=bench.args.busy_polling_cores,
        placements=results,
        figures=fused_over_plain(results),
    )


def waves(
    bench: Bench, models: LoadedModels, placement: str, batches: tuple[int, ...]
) -> dict[int, ServiceWave]:
    """Return a wave for each batch size. The missing ones are measured with one service, so that
    each is measured once per run."""
    missing = [b for b in batches if ("serving", models.name, placement, b) not in bench.memo]
    if missing:
        found = run_loop(_measure(bench, models, placement, missing))
        for batch, wave in found.items():
            bench.memo["serving", models.name, placement, batch] = wave
    return {batch: bench.memo["serving", models.name, placement, batch] for batch in batches}


def describe_wave(wave: ServiceWave) -> dict[str, Any]:
    """Return the figures of a wave, and the number of its answers that loop."""
    loops = sum(is_loop(stream.tokens) for stream in wave.streams)
    return {**wave.summary(), "answers_that_loop": loops}


def fused_over_plain(results: dict[str, dict[str, Any]]) -> dict[str, object]:
    """Return the requests per second of fused drafting divided by those of plain decoding, by batch
    size. The ratios are in the figure `fused_over_plain`, which is missing if there are none."""
    ratios = {}
    for batch in map(str, BOTH):
        pair = [results.get(name, {}).get(batch) for name in (FUSED, PLAIN)]
        if pair[0] and pair[1]:
            ratios[batch] = round(pair[0]["requests_per_s"] / pair[1]["requests_per_s"], 4)
    return {"fused_over_plain": ratios} if ratios else {}


async def _measure(
    bench: Bench, models: LoadedModels, placement: str, batches: list[int]
) -> dict[int, ServiceWave]:
    setup = ServingSetup(placement=placement, draft_length=DRAFT_LENGTH, warm_buckets=True)
    setup = sized(bench, setup)
    sampling = SamplingParams(temperature=bench.args.temperature, seed=1234)
    found = {}
    async with serve_models(models, setup) as running:
        for batch in batches:
            prompts = bench.prompts(max(4, REQUESTS * batch))
            warm = min(WARM_TOKENS, bench.output_tokens)
            await drive_sessions(running, prompts, warm, concurrency=batch, tag=f"w{batch}")
            found[batch] = await drive_sessions(
                running,
                prompts,
                bench.output_tokens,
                sampling=sampling,
                stop_ids=bench.stop_ids,
                concurrency=batch,
                tag=f"b{batch}",
            )
    return found
