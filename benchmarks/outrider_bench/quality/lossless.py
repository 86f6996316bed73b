"""`outrider bench lossless`: token ids with and without a drafter, with differences explained.

A difference is explained by running the target over the common prefix, in this process and in
float32: at the first differing position the two ids must be a near tie of (logits / T + noise).
"""

from __future__ import annotations

import argparse
import concurrent.futures
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from outrider.client import Client, GenerateResult, user
from outrider.client.local.cluster import LocalCluster
from outrider.engine.kv_cache import KVSequence
from outrider.engine.model_loader import load_target
from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.spec.noise import NoiseStream, gumbel
from outrider.text.tokenizer import Tokenizer
from outrider_bench.environment import describe
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import BenchPrompt, load_prompts
from outrider_bench.report import print_progress, print_result

SEED = 1234
NEAR_TIE = 1e-3
"""Largest gap of perturbed logits that float32 sums in another order can turn over."""
DRAFTS: dict[str, dict[str, object]] = {
    "chain4": {"drafter": "eagle3", "draft_tokens": 4, "look_ahead": 0},
    "tree32": {"drafter": "eagle3", "draft_tokens": 32, "draft_top_k": 8, "look_ahead": 0},
    "chain4+ahead": {"drafter": "eagle3", "draft_tokens": 4, "look_ahead": 1},
    "tree32+ahead": {
        "drafter": "eagle3",
        "draft_tokens": 32,
        "draft_top_k": 8,
        "look_ahead": 1,
        "fan_out": 16,
    },
    "ngram": {"drafter": "ngram", "draft_tokens": 8},
}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "rule": "coupled", "seed": SEED},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)


def run(args: argparse.Namespace) -> None:
    """Measure and report."""
    config = local_config(args, max_sessions=max(8, args.concurrency))
    # Every mode is to draft, whatever that gives.
    config = replace(config, planner="fixed")
    prompts = load_prompts(args.prompts, args.limit)
    cases: dict[str, object] = {}
    explain = _Explainer(config.model)
    with LocalCluster(config) as cluster, Client(cluster.address, timeout_s=900.0) as client:
        for rule, sampling in SAMPLING.items():
            plain = _answers(client, prompts, args, drafter="none", **sampling)
            for name, drafts in DRAFTS.items():
                drafted = _answers(client, prompts, args, **sampling, **drafts)
                case = _compare(
                    prompts, plain, drafted, explain, float(str(sampling["temperature"]))
                )
                cases[f"{rule}/{name}"] = case
                print_progress(f"{rule}/{name}: {case}")
    result = {"benchmark": "lossless", **describe(), "model": config.model_name}
    result |= describe_placement(config)
    result |= {"max_tokens": args.max_tokens, "prompts": len(prompts)}
    result |= {"near_tie_bound": NEAR_TIE, "cases": cases}
    print_result(args, result)


def _answers(
    client: Client, prompts: list[BenchPrompt], args: argparse.Namespace, **options: object
) -> list[GenerateResult]:
    def one(prompt: BenchPrompt) -> GenerateResult:
        return client.generate([user(prompt.text)], max_tokens=args.max_tokens, **options)  # type: ignore[arg-type]

    with concurrent.futures.ThreadPoolExecutor(args.concurrency) as pool:
        return list(pool.map(one, prompts))


def _compare(
    prompts: list[BenchPrompt],
    plain: list[GenerateResult],
    drafted: list[GenerateResult],
    explain: _Explainer,
    temperature: float,
) -> dict[str, object]:
    """How many answers are identical, and the gap at each first difference."""
    gaps = []
    for prompt, expected, actual in zip(prompts, plain, drafted, strict=True):
        if expected.token_ids != actual.token_ids:
            gaps.append(explain.gap(prompt, expected.token_ids, actual.token_ids, temperature))
    return {
        "identical": len(plain) - len(gaps),
        "of": len(plain),
        "hit_rounds": sum(answer.finish.stats.hit_rounds for answer in drafted),
        "rounds": sum(answer.finish.stats.rounds for answer in drafted),
        "gaps": [float(f"{gap:.3g}") for gap in gaps],
        "all_near_ties": all(gap <= NEAR_TIE for gap in gaps),
    }


class _Explainer:
    """The target in this process, for one prefix at a time."""

    def __init__(self, model: Path) -> None:
        self._target: TargetModel = load_target(model, dtype=torch.float32, kv_tokens=8192)
        self._tokenizer = Tokenizer.load(model)

    def gap(
        self,
        prompt: BenchPrompt,
        expected: Sequence[int],
        actual: Sequence[int],
        temperature: float,
    ) -> float:
        """Distance of the two ids at the first difference, in units of logits / T + noise."""
        same = 0
        while same < min(len(expected), len(actual)) and expected[same] == actual[same]:
            same += 1
        if same == min(len(expected), len(actual)):
            return float("inf")
        ids = self._tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        prefix = [*ids, *expected[:same]]
        scores = self._logits(prefix).double()
        if temperature > 0:
            noise = gumbel(SEED, NoiseStream.TARGET, len(prefix), np.arange(len(scores)))
            scores = scores / temperature + torch.from_numpy(noise)
        return abs(float(scores[expected[same]] - scores[actual[same]]))

    def _logits(self, prefix: list[int]) -> torch.Tensor:
        sequence: KVSequence = self._target.pool.allocate(len(prefix))
        try:
            segment = Segment(
                sequence=sequence, num_rows=len(prefix), positions=torch.arange(len(prefix))
            )
            batch = ForwardBatch(
                token_ids=torch.tensor(prefix),
                segments=[segment],
                logit_rows=torch.tensor([len(prefix) - 1]),
            )
            return self._target.forward(batch).logits[0]
        finally:
            sequence.release()
