"""`outrider bench local`: speculative, plain and transformers decoding, interleaved in one run.

Every prompt goes through the three lanes in turn, in an order that rotates, so that a drift of
the machine's speed hits all of them alike. A lane's figure is its tokens over its seconds, the
prompt's prefill included. Answers that loop are measured and left out of the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from outrider.client import Client, GenerateOptions, user
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import CPU, LocalConfig
from outrider.text.tokenizer import Tokenizer
from outrider.transport.grpc import GrpcDialer
from outrider.transport.tls import Role
from outrider.wire.messages import VerifierInfo
from outrider_bench.environment import describe
from outrider_bench.models import add_model_arguments, describe_placing, local_config
from outrider_bench.prompts import BenchPrompt, is_loop, load_prompts
from outrider_bench.report import finish, say
from outrider_bench.transformers_baseline import TransformersBaseline

Run = Callable[[BenchPrompt], tuple[tuple[int, ...], float]]


@dataclass(slots=True)
class Lane:
    """One way of decoding and what it took, prompt by prompt."""

    name: str
    run: Run
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, keep: list[int]) -> float:
        """Tokens over seconds of the kept prompts."""
        return sum(self.tokens[i] for i in keep) / sum(self.seconds[i] for i in keep)

    def ratio_to(self, other: Lane, keep: list[int]) -> list[float]:
        """Speed relative to another lane, prompt by prompt."""
        return [
            (self.tokens[i] / self.seconds[i]) / (other.tokens[i] / other.seconds[i]) for i in keep
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--draft-topk", type=int, default=1)


def run(args: argparse.Namespace) -> None:
    """Measure and report."""
    config = local_config(args)
    prompts = load_prompts(args.prompts, args.limit)
    baseline = TransformersBaseline(config.model, dtype=config.element_type, threads=args.threads)
    tokenizer = Tokenizer.load(config.model)
    with LocalCluster(config) as cluster, Client(cluster.address, timeout_s=600.0) as client:
        asked: GenerateOptions = {"max_tokens": args.max_tokens, "temperature": 0.0}
        drafts: GenerateOptions = {
            **asked,
            "drafter": "eagle3",
            "draft_tokens": args.draft_tokens,
            "draft_top_k": args.draft_topk,
            "look_ahead": _look_ahead(config),
        }
        none: GenerateOptions = {**asked, "drafter": "none"}

        def speculative(prompt: BenchPrompt) -> tuple[tuple[int, ...], float]:
            return _timed(client, prompt, drafts)

        def plain(prompt: BenchPrompt) -> tuple[tuple[int, ...], float]:
            return _timed(client, prompt, none)

        def transformers(prompt: BenchPrompt) -> tuple[tuple[int, ...], float]:
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            token_ids, seconds = baseline.generate(ids, args.max_tokens)
            return tuple(token_ids), seconds

        lanes = [Lane("speculative", speculative), Lane("plain", plain)]
        lanes.append(Lane("transformers", transformers))
        keep = _measure(lanes, prompts)
        # The verifier's medians run over its last 512 rounds: let those be speculative ones.
        for prompt in prompts[:8]:
            speculative(prompt)
        info = _verifier_info(cluster)
    _report(args, config, lanes, keep, info)


def _look_ahead(config: LocalConfig) -> int:
    """As the automatic planner begins: in lock-step where drafter and target share their cores."""
    return int(config.device != CPU)


def _timed(
    client: Client, prompt: BenchPrompt, options: GenerateOptions
) -> tuple[tuple[int, ...], float]:
    began = time.perf_counter()
    result = client.generate([user(prompt.text)], **options)
    return result.token_ids, time.perf_counter() - began


def _measure(lanes: list[Lane], prompts: list[BenchPrompt]) -> list[int]:
    """Run every lane on every prompt; indices of the prompts whose answer does not loop."""
    for lane in lanes:
        lane.run(prompts[0])
    keep = []
    for index, prompt in enumerate(prompts):
        loops = False
        for turn in range(len(lanes)):
            lane = lanes[(turn + index) % len(lanes)]
            token_ids, seconds = lane.run(prompt)
            lane.tokens.append(len(token_ids))
            lane.seconds.append(seconds)
            loops = loops or is_loop(token_ids)
        if not loops:
            keep.append(index)
        rates = ", ".join(f"{lane.name} {lane.tokens[-1] / lane.seconds[-1]:.1f}" for lane in lanes)
        say(f"prompt {index + 1}/{len(prompts)} tokens/s: {rates}{' (loops)' if loops else ''}")
    return keep


def _verifier_info(cluster: LocalCluster) -> VerifierInfo:
    address = cluster.members[Role.VERIFIER][0].address

    async def ask() -> VerifierInfo:
        dialer = GrpcDialer()
        try:
            return await (await dialer.verifier(address)).info()
        finally:
            await dialer.close()

    return asyncio.run(ask())


def _report(
    args: argparse.Namespace,
    config: LocalConfig,
    lanes: list[Lane],
    keep: list[int],
    info: VerifierInfo,
) -> None:
    speculative, plain, transformers = lanes
    everything = list(range(len(plain.tokens)))
    rates = {lane.name: round(lane.tokens_per_s(keep), 2) for lane in lanes}
    result = {
        "benchmark": "local",
        **describe(),
        "model": config.model_name,
        **describe_placing(config),
        "threads": args.threads,
        "draft_tokens": args.draft_tokens,
        "draft_topk": args.draft_topk,
        "look_ahead": _look_ahead(config),
        "max_tokens": args.max_tokens,
        "prompts": len(everything),
        "prompts_without_loops": len(keep),
        "tokens_per_s": rates,
        "tokens_per_s_with_loops": {
            lane.name: round(lane.tokens_per_s(everything), 2) for lane in lanes
        },
        "median_ratio_by_prompt": {
            "speculative_over_plain": round(median(speculative.ratio_to(plain, keep)), 3),
            "plain_over_transformers": round(median(plain.ratio_to(transformers, keep)), 3),
        },
        "round_ms": round(info.round_ms_p50, 2),
        "forward_ms": round(info.forward_ms_p50, 2),
        "speculative_over_plain": round(rates["speculative"] / rates["plain"], 3),
        "plain_over_transformers": round(rates["plain"] / rates["transformers"], 3),
        "round_overhead_ms": round(info.overhead_ms_p50, 3),
    }
    finish(args, result)
