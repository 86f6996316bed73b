"""Tokens per round by acceptance rule and temperature, and time per output token.

Drafts are chains of four. The model is the widened one, which computes the real model's function at
the cost of a large model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.process_tuning import run_event_loop as run_loop
from outrider.spec.sampling import Rule, SamplingParams
from outrider_bench.gpu.plain import sized
from outrider_bench.gpu.support.benchmark_context import SPARE_SESSIONS, Bench, show
from outrider_bench.gpu.support.load_driver import ServiceWave, drive_sessions
from outrider_bench.gpu.support.services import FUSED, ServingSetup, serve_models
from outrider_bench.prompts import is_loop

CHAIN = 4
CONCURRENCY = 8
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
RULES = (Rule.TARGET_ONLY, Rule.REJECTION, Rule.COUPLED)
MAX_TOKENS = 96


def run(bench: Bench) -> dict[str, object]:
    """Measure every acceptance rule at every temperature and return the result for the JSON
    file."""
    models = bench.widened()
    found = table(bench)
    figures = {
        rule: {t: cell["emitted_per_round"] for t, cell in row.items()}
        for rule, row in found.items()
    }
    rows = [
        (rule, t, cell["emitted_per_round"], cell["ms_per_token"], cell["answers"])
        for rule, row in found.items()
        for t, cell in row.items()
    ]
    show(
        f"acceptance, {models.name}, chain of {CHAIN}",
        ("rule", "T", "tokens a round", "ms a token", "answers"),
        rows,
    )
    return bench.result(
        "acceptance",
        models,
        chain=CHAIN,
        output_tokens=min(MAX_TOKENS, bench.output_tokens),
        by_rule=found,
        figures={"acceptance": figures},
    )


def table(bench: Bench) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of `describe_wave` by acceptance rule and then by temperature. They are
    measured once per run."""
    if "acceptance" not in bench.memo:
        bench.memo["acceptance"] = run_loop(_measure(bench))
    found: dict[str, dict[str, dict[str, Any]]] = bench.memo["acceptance"]
    return found


async def _measure(bench: Bench) -> dict[str, dict[str, dict[str, Any]]]:
    placement = bench.placements(FUSED)[0]
    setup = sized(
        bench,
        ServingSetup(placement=placement, draft_length=CHAIN, warm_buckets=True, sampled=True),
    )
    setup = replace(setup, max_sessions=min(setup.max_sessions, CONCURRENCY + SPARE_SESSIONS))
    limit = min(CONCURRENCY, setup.max_sessions)
    tokens = min(MAX_TOKENS, bench.output_tokens)
    prompts = bench.prompts()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    async with serve_models(bench.widened(), setup) as running:
        # Every prompt once: their lengths meet products of new shapes, which are slow at first.
        await drive_sessions(running, prompts, min(tokens, 16), concurrency=limit, tag="warm")
        for rule in RULES:
            for temperature in TEMPERATURES:
                sampling = SamplingParams(temperature=temperature, rule=rule, seed=1234)
                wave = await drive_sessions(
                    running,
                    prompts,
                    tokens,
                    sampling=sampling,
                    stop_ids=bench.stop_ids,
                    concurrency=limit,
                    tag=f"{rule}-{temperature}",
                )
                found.setdefault(str(rule), {})[f"{temperature:g}"] = describe_wave(wave)
    return found


def describe_wave(wave: ServiceWave) -> dict[str, Any]:
    """Return the tokens per round of the answers that do not loop (`emitted_per_round`) and of all
    answers (`with_loops`), the median time per token of all answers, and counts of answers and
    fallback rounds."""
    clean = [stream for stream in wave.streams if not is_loop(stream.tokens)]
    rounds = sum(stream.stats.rounds for stream in clean)
    emitted = sum(stream.stats.emitted for stream in clean)
    per_token: Any = wave.summary()["per_token_ms"]
    return {
        "emitted_per_round": round(emitted / rounds, 4) if rounds else None,
        "answers": len(clean),
        "with_loops": round(wave.mean_emitted, 4),
        "fallback_rounds": sum(stream.stats.fallback_rounds for stream in wave.streams),
        "ms_per_token": per_token.get("p50"),
    }
