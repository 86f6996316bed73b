"""Lossless check on the device: greedy text with and without speculation, differences explained.

In bfloat16 another summation order may swap the two tokens of a near tie; no other difference is
allowed. The target runs once more over the text before the first different token. There the logits
of the two tokens must differ by at most `NEAR_TIE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.process_tuning import run_event_loop as run_loop
from outrider_bench.gpu.plain import sized
from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.load_driver import drive_sessions
from outrider_bench.gpu.support.services import (
    FUSED,
    PLAIN,
    LoadedModels,
    ServingSetup,
    serve_models,
)

NEAR_TIE = 0.5
"""Largest difference of two logits whose order bfloat16 rounding can change: about four rounding
steps at the logits' usual size of 16 to 32."""
DRAFT_LENGTH = 4
CONCURRENCY = 8


def run(bench: Bench) -> dict[str, object]:
    """Compare the answers of every requested placement with those of plain decoding and return the
    result for the JSON file."""
    models = bench.real()
    prompts = bench.prompts()
    plain = answers(bench, models, ServingSetup(placement=PLAIN), prompts)
    cases, rows = {}, []
    for placement in bench.placements(FUSED):
        setup = ServingSetup(placement=placement, draft_length=DRAFT_LENGTH)
        drafted = answers(bench, models, setup, prompts)
        case = compare(models.target, prompts, plain, drafted)
        cases[placement] = case
        rows.append((placement, case["identical"], case["of"], case["largest_gap"]))
    show(
        f"greedy text against plain decoding, {models.name}, near tie: {NEAR_TIE}",
        ("placement", "identical", "of", "largest gap"),
        rows,
    )
    return bench.result(
        "equality",
        models,
        near_tie_bound=NEAR_TIE,
        output_tokens=bench.output_tokens,
        draft_length=DRAFT_LENGTH,
        cases=cases,
    )


def answers(
    bench: Bench, models: LoadedModels, setup: ServingSetup, prompts: list[list[int]]
) -> list[list[int]]:
    """Return the tokens of the greedy answer to each prompt. Up to `CONCURRENCY` requests run at a
    time."""

    async def measure() -> list[list[int]]:
        async with serve_models(models, sized(bench, setup)) as running:
            limit = min(CONCURRENCY, running.setup.max_sessions)
            wave = await drive_sessions(
                running,
                prompts,
                bench.output_tokens,
                stop_ids=bench.stop_ids,
                concurrency=limit,
            )
            return [stream.tokens for stream in wave.streams]

    return run_loop(measure())


def compare(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Compare the answers to `prompts` of plain decoding with those made with drafts.

    Returns how many are identical (`identical` of `of`), and for each other one the position of the
    first different token and the difference of the logits of the two tokens there (`gap`).
    """
    differences = []
    for index, (prompt, expected, actual) in enumerate(zip(prompts, plain, drafted, strict=True)):
        if list(expected) == list(actual):
            continue
        same = common_prefix(expected, actual)
        difference: dict[str, Any] = {"prompt": index, "at": same, "gap": float("inf")}
        if same < min(len(expected), len(actual)):
            logits = last_logits(target, [*prompt, *expected[:same]])
            pair = (expected[same], actual[same])
            difference["gap"] = round(abs(float(logits[pair[0]] - logits[pair[1]])), 4)
            difference["top2"] = sorted(pair) == sorted(logits.topk(2).indices.tolist())
            difference["tokens"] = pair
        differences.append(difference)
    tokens = sum(common_prefix(a, b) for a, b in zip(plain, drafted, strict=True))
    gaps = [difference["gap"] for difference in differences]
    return {
        "identical": len(plain) - len(differences),
        "of": len(plain),
        "differences_per_1000_tokens": round(1000.0 * len(gaps) / max(1, tokens), 4),
        "largest_gap": max(gaps, default=0.0),
        "all_near_ties": all(gap <= NEAR_TIE for gap in gaps),
        "differences": differences,
    }


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def last_logits(target: TargetModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [V] after the last token, float32 on the host, from one forward of the
    target without CUDA graphs."""
    sequence = target.pool.allocate(len(tokens))
    try:
        device = target.device
        segment = Segment(
            sequence=sequence,
            num_rows=len(tokens),
            positions=torch.arange(len(tokens), device=device),
        )
        batch = ForwardBatch(
            token_ids=torch.tensor(list(tokens), device=device),
            segments=[segment],
            logit_rows=torch.tensor([len(tokens) - 1], device=device),
        )
        return target.forward(batch).logits[0].float().cpu()
    finally:
        sequence.release()
