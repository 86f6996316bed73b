"""`outrider bench lossless`: token ids with and without drafts, at several numbers of sessions.

The expected answers are those without a drafter at the first number of sessions. All other answers,
with drafts or at other numbers of sessions, are compared with them. On a CPU each difference is
explained: the target runs over the common prefix in this process, in float32. At the first
differing position the scores of the two ids, logits / T + noise, must be a near tie. With
`--batch-invariant` there must be no difference.
"""

from __future__ import annotations

import argparse
import concurrent.futures
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from outrider.client import Client, GenerateResult, user
from outrider.client.flags import integer_at_least
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import CPU, SEPARATE, LocalFleetConfig
from outrider.engine.kv_cache import KVSequence
from outrider.engine.model_loader import load_target
from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.errors import InternalError
from outrider.spec.noise import NoiseStream, gumbel
from outrider.text.tokenizer import Tokenizer
from outrider_bench.environment import describe
from outrider_bench.gpu.lossless import common_prefix
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import BenchPrompt, load_prompts
from outrider_bench.report import print_progress, print_result

SEED: Final = 1234
NEAR_TIE: Final = 1e-3
"""Largest difference of two scores (logits / T + noise) whose order may change with the order of
float32 summation."""
AUTO: Final = "auto"
NONE: Final = "none"
DRAFTS: Final[Mapping[str, Mapping[str, object]]] = {
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
    AUTO: {"drafter": "eagle3"},
}
"""Request parameters by name of the draft setting. With `auto` the planner chooses the shape."""
SAMPLING: Final[Mapping[str, Mapping[str, object]]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "rule": "coupled", "seed": SEED},
    "coupled_top_p": {"temperature": 0.8, "top_p": 0.9, "rule": "coupled", "seed": SEED},
}
_MAX_DIFFERENCES: Final = 20
"""Maximum number of differences that the result lists for each draft setting and number of
sessions."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--max-tokens", type=integer_at_least(1), default=128, help="length of answers")
    add("--sessions", default="1", help="comma-separated numbers of concurrent requests")
    add(
        "--drafts",
        help=f"comma-separated, of {', '.join(DRAFTS)}; default: all but auto with separate "
        "drafters on CPUs, else auto",
    )
    add("--sampling", default="greedy,coupled", help=f"comma-separated, of {', '.join(SAMPLING)}")
    add("--prefix-cache", action="store_true", help="keep the KV of prompts between requests")
    add("--kv-tokens", type=integer_at_least(1), help="KV tokens of a verifier; few preempt")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result. Raises InternalError if there is a difference with
    `--batch-invariant`."""
    sessions = [int(number) for number in args.sessions.split(",")]
    config = local_config(args, max_sessions=max(8, *sessions), queue_limit=4 * max(8, *sessions))
    names = _chosen("--drafts", args.drafts or ",".join(_default_drafts(config)), DRAFTS)
    rules = _chosen("--sampling", args.sampling, SAMPLING)
    # Named drafts are to be verified whatever that gives.
    planner = "automatic" if names == [AUTO] else "fixed"
    config = replace(
        config, planner=planner, prefix_cache=args.prefix_cache, kv_tokens=args.kv_tokens
    )
    prompts = load_prompts(args.prompts, args.limit)
    explains = config.device == CPU and not config.batch_invariant
    explain = _Explainer(config.model) if explains else None
    cells: list[dict[str, object]] = []
    with LocalCluster(config) as cluster, Client(cluster.address, timeout_s=900.0) as client:
        for rule in rules:
            sampling = SAMPLING[rule]
            expected = _answers(client, prompts, args, sessions[0], drafter=NONE, **sampling)
            for number in sessions:
                for name in (NONE, *names):
                    if name == NONE and number == sessions[0]:
                        continue
                    drafts = {"drafter": NONE} if name == NONE else DRAFTS[name]
                    actual = _answers(client, prompts, args, number, **sampling, **drafts)
                    cell: dict[str, object] = {
                        "configuration": name,
                        "rule": rule,
                        "sessions": number,
                        **_compare(expected, actual),
                    }
                    if explain is not None:
                        temperature = float(str(sampling["temperature"]))
                        cell |= explain.differences(prompts, expected, actual, temperature)
                    cells.append(cell)
                    print_progress(str(cell))
    result = {"benchmark": "lossless", **describe(), "model": config.model_name}
    result |= describe_placement(config)
    result |= {
        "batch_invariant": config.batch_invariant,
        "prefix_cache": config.prefix_cache,
        "kv_tokens": config.kv_tokens,
        "max_tokens": args.max_tokens,
        "prompts": len(prompts),
        "near_tie_bound": NEAR_TIE if explains else None,
        "cells": cells,
    }
    print_result(args, result)
    if config.batch_invariant and any(cell["same"] != cell["of"] for cell in cells):
        raise InternalError("answers differ with batch invariance", reason="DIFFERENT_ANSWERS")


def _default_drafts(config: LocalFleetConfig) -> list[str]:
    if config.device == CPU and config.placement == SEPARATE:
        return [name for name in DRAFTS if name != AUTO]
    return [AUTO]


def _chosen(flag: str, text: str, known: Mapping[str, object]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{flag}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return names


def _answers(
    client: Client,
    prompts: Sequence[BenchPrompt],
    args: argparse.Namespace,
    sessions: int,
    **options: object,
) -> list[GenerateResult]:
    def one(prompt: BenchPrompt) -> GenerateResult:
        return client.generate([user(prompt.text)], max_tokens=args.max_tokens, **options)  # type: ignore[arg-type]

    with concurrent.futures.ThreadPoolExecutor(sessions) as pool:
        return list(pool.map(one, prompts))


def _compare(
    expected: Sequence[GenerateResult], actual: Sequence[GenerateResult]
) -> dict[str, object]:
    """Return the number of equal answers, and where the others first differ."""
    first = [
        (index, common_prefix(one.token_ids, other.token_ids))
        for index, (one, other) in enumerate(zip(expected, actual, strict=True))
        if one.token_ids != other.token_ids
    ]
    stats = [answer.finish.stats for answer in actual]
    return {
        "same": len(expected) - len(first),
        "of": len(expected),
        "tokens": sum(len(answer.token_ids) for answer in actual),
        "rounds": sum(each.rounds for each in stats),
        "hit_rounds": sum(each.hit_rounds for each in stats),
        "accepted": sum(each.accepted for each in stats),
        "first_differences": first[:_MAX_DIFFERENCES],
    }


class _Explainer:
    """Explains differences with a target model in this process, which computes one prefix at a
    time."""

    def __init__(self, model: Path) -> None:
        self._target: TargetModel = load_target(model, dtype=torch.float32, kv_tokens=8192)
        self._tokenizer = Tokenizer.load(model)

    def differences(
        self,
        prompts: Sequence[BenchPrompt],
        expected: Sequence[GenerateResult],
        actual: Sequence[GenerateResult],
        temperature: float,
    ) -> dict[str, object]:
        """Return the difference of the two ids' scores at the first differing position of each
        answer, and whether all of them are near ties."""
        gaps = [
            self._gap(prompt, one.token_ids, other.token_ids, temperature)
            for prompt, one, other in zip(prompts, expected, actual, strict=True)
            if one.token_ids != other.token_ids
        ]
        return {
            "gaps": [float(f"{gap:.3g}") for gap in gaps],
            "all_near_ties": all(gap <= NEAR_TIE for gap in gaps),
        }

    def _gap(
        self,
        prompt: BenchPrompt,
        expected: Sequence[int],
        actual: Sequence[int],
        temperature: float,
    ) -> float:
        """Return the difference of the two ids' scores (logits / T + noise) at the first
        difference; infinite if one answer is a prefix of the other."""
        same = common_prefix(expected, actual)
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
