"""`outrider bench local`: speculative decoding, plain decoding and transformers, interleaved in one
run.

Each prompt goes through the three methods one after another, in an order that rotates from prompt
to prompt, so that a drift of the machine's speed affects all methods equally. The speed of a method
is its number of tokens per second, including prefill. Prompts whose answers loop are left out of
the ratios; the speeds are reported both with and without them.
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
from outrider.client.local.config import CPU, LocalFleetConfig
from outrider.text.tokenizer import Tokenizer
from outrider.transport.grpc import GrpcDialer
from outrider.transport.tls import CertificateRole
from outrider.wire.messages import VerifierInfo
from outrider_bench.environment import describe
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import BenchPrompt, is_loop, load_prompts
from outrider_bench.report import print_progress, print_result
from outrider_bench.transformers_baseline import TransformersBaseline

DecodePrompt = Callable[[BenchPrompt], tuple[tuple[int, ...], float]]


@dataclass(slots=True)
class DecodingMethod:
    """A decoding method, with the number of tokens and the seconds of its answer to each prompt."""

    name: str
    run: DecodePrompt
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, keep: list[int]) -> float:
        """Return the tokens per second over all prompts whose indices are in `keep`."""
        return sum(self.tokens[i] for i in keep) / sum(self.seconds[i] for i in keep)

    def ratio_to(self, other: DecodingMethod, keep: list[int]) -> list[float]:
        """Return this method's tokens per second divided by those of `other`, for each prompt index
        in `keep`."""
        return [
            (self.tokens[i] / self.seconds[i]) / (other.tokens[i] / other.seconds[i]) for i in keep
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--draft-top-k", type=int, default=1)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
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
            "draft_top_k": args.draft_top_k,
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

        methods = [DecodingMethod("speculative", speculative), DecodingMethod("plain", plain)]
        methods.append(DecodingMethod("transformers", transformers))
        keep = _measure(methods, prompts)
        # The verifier's medians run over its last 512 rounds: let those be speculative ones.
        for prompt in prompts[:8]:
            speculative(prompt)
        info = _verifier_info(cluster)
    _report(args, config, methods, keep, info)


def _look_ahead(config: LocalFleetConfig) -> int:
    """Return the value of the request option `look_ahead`: 0 (lock-step) on a CPU, where drafter
    and target share their cores, else 1. The automatic planner begins with the same value."""
    return int(config.device != CPU)


def _timed(
    client: Client, prompt: BenchPrompt, options: GenerateOptions
) -> tuple[tuple[int, ...], float]:
    began = time.perf_counter()
    result = client.generate([user(prompt.text)], **options)
    return result.token_ids, time.perf_counter() - began


def _measure(methods: list[DecodingMethod], prompts: list[BenchPrompt]) -> list[int]:
    """Run every method on every prompt; return the indices of the prompts whose answers do not
    loop."""
    for method in methods:
        method.run(prompts[0])
    keep = []
    for index, prompt in enumerate(prompts):
        loops = False
        for turn in range(len(methods)):
            method = methods[(turn + index) % len(methods)]
            token_ids, seconds = method.run(prompt)
            method.tokens.append(len(token_ids))
            method.seconds.append(seconds)
            loops = loops or is_loop(token_ids)
        if not loops:
            keep.append(index)
        rates = ", ".join(
            f"{method.name} {method.tokens[-1] / method.seconds[-1]:.1f}" for method in methods
        )
        print_progress(
            f"prompt {index + 1}/{len(prompts)} tokens/s: {rates}{' (loops)' if loops else ''}"
        )
    return keep


def _verifier_info(cluster: LocalCluster) -> VerifierInfo:
    address = cluster.members[CertificateRole.VERIFIER][0].address

    async def ask() -> VerifierInfo:
        dialer = GrpcDialer()
        try:
            return await (await dialer.verifier(address)).info()
        finally:
            await dialer.close()

    return asyncio.run(ask())


def _report(
    args: argparse.Namespace,
    config: LocalFleetConfig,
    methods: list[DecodingMethod],
    keep: list[int],
    info: VerifierInfo,
) -> None:
    speculative, plain, transformers = methods
    everything = list(range(len(plain.tokens)))
    rates = {method.name: round(method.tokens_per_s(keep), 2) for method in methods}
    result = {
        "benchmark": "local",
        **describe(),
        "model": config.model_name,
        **describe_placement(config),
        "threads": args.threads,
        "draft_tokens": args.draft_tokens,
        "draft_top_k": args.draft_top_k,
        "look_ahead": _look_ahead(config),
        "max_tokens": args.max_tokens,
        "prompts": len(everything),
        "prompts_without_loops": len(keep),
        "tokens_per_s": rates,
        "tokens_per_s_with_loops": {
            method.name: round(method.tokens_per_s(everything), 2) for method in methods
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
    print_result(args, result)
