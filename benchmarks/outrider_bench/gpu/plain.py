"""Time per token of plain decoding, end to end in a verifier service."""

from __future__ import annotations

from dataclasses import replace

from outrider.process_tuning import run_event_loop as run_loop
from outrider_bench.gpu.support.benchmark_context import SPARE_SESSIONS, Bench, show
from outrider_bench.gpu.support.load_driver import ServiceWave, drive_sessions, random_prompts
from outrider_bench.gpu.support.services import PLAIN, LoadedModels, ServingSetup, serve_models
from outrider_bench.report import percentiles

VLLM_MS = {1: 4.73, 8: 4.90, 32: 5.63, 64: 6.53}
WARM_TOKENS = 24


def run(bench: Bench) -> dict[str, object]:
    """Measure every batch size with the random-weight model and return the result for the JSON
    file."""
    models = bench.random()
    waves = run_loop(measure(bench, models, ServingSetup(placement=PLAIN)))
    cells = {str(batch): round(wave.round_ms, 4) for batch, wave in waves.items()}
    show(
        f"plain decoding, {models.name}, {bench.prompt_tokens} in, {bench.output_tokens} out",
        ("batch", "ms per token", "vLLM 0.26 on H200", "tokens/s", "TTFT p50 ms"),
        [
            (
                batch,
                cells[str(batch)],
                VLLM_MS.get(batch, ""),
                round(wave.steady_tokens_per_s, 1),
                percentiles(wave.first_ms).get("p50"),
            )
            for batch, wave in waves.items()
        ],
    )
    return bench.result(
        "plain",
        models,
        prompt_tokens=bench.prompt_tokens,
        output_tokens=bench.output_tokens,
        by_batch={str(batch): wave.summary() for batch, wave in waves.items()},
        figures={"plain_ms": cells},
    )


async def measure(
    bench: Bench, models: LoadedModels, setup: ServingSetup
) -> dict[int, ServiceWave]:
    """Run one wave of random prompts for each batch size with one service. Return the waves by
    batch size. A short unmeasured wave before each one captures its CUDA graphs."""
    setup = sized(bench, setup)
    waves: dict[int, ServiceWave] = {}
    async with serve_models(models, setup) as running:
        for batch in bench.batches:
            vocab = models.target.vocab_size
            prompts = random_prompts(batch, bench.prompt_tokens, vocab, seed=batch)
            warm = min(WARM_TOKENS, bench.output_tokens)
            await drive_sessions(running, prompts, warm, tag=f"warm-{batch}")
            waves[batch] = await drive_sessions(
                running, prompts, bench.output_tokens, tag=f"b{batch}"
            )
    return waves


def sized(bench: Bench, setup: ServingSetup) -> ServingSetup:
    """Return the setup with limits for the largest batch size, and with the values of this run's
    flags."""
    return replace(
        setup,
        max_sessions=max(bench.batches) + SPARE_SESSIONS,
        max_tokens=bench.max_tokens,
        cuda_graphs=bench.args.graphs,
        drafter_device=bench.args.drafter_device,
        busy_polling_cores=bench.args.busy_polling_cores,
    )
