"""`outrider bench acceptance`: mean tokens emitted per round, by draft shape, rule and temperature.

Rounds and tokens are summed over the answers that do not loop (see `prompts.LOOP_SHARE`). The means
over all answers are also reported. The token that prefill emits does not count.
"""

from __future__ import annotations

import argparse
import concurrent.futures
from dataclasses import dataclass

from outrider.client import Client, GenerateResult, user
from outrider.client.local.cluster import LocalCluster
from outrider_bench.environment import describe
from outrider_bench.models import add_model_arguments, local_config
from outrider_bench.prompts import BenchPrompt, is_loop, load_prompts
from outrider_bench.report import print_progress, print_result

SHAPES = {"chain4": (4, 1), "tree32": (32, 8)}
"""Draft shapes by name: (number of draft tokens, maximum number of children of a node)."""
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0)
RULES = ("target-only", "rejection", "coupled")


@dataclass(slots=True)
class AcceptanceTally:
    """Number of rounds and of emitted tokens, summed over several answers."""

    answers: int = 0
    rounds: int = 0
    emitted: int = 0

    def add(self, result: GenerateResult) -> None:
        """Add the counts of one answer."""
        self.answers += 1
        self.rounds += result.finish.stats.rounds
        self.emitted += result.finish.stats.emitted

    @property
    def mean(self) -> float:
        """Mean number of tokens emitted per round; 0 without rounds."""
        return round(self.emitted / self.rounds, 3) if self.rounds else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--max-tokens", type=int, default=128)
    add("--concurrency", type=int, default=4)
    add("--sampled-prompts", type=int, default=12, help="prompts of the temperature table")
    add("--sampled-tokens", type=int, default=96, help="tokens an answer of that table")
    add("--depth", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    config = local_config(args, max_sessions=max(8, args.concurrency))
    prompts = load_prompts(args.prompts, args.limit)
    with LocalCluster(config) as cluster, Client(cluster.address, timeout_s=900.0) as client:
        runner = _Runner(client, args.concurrency)
        shapes = {name: _by_task(runner, prompts, args, shape) for name, shape in SHAPES.items()}
        table = _by_temperature(runner, prompts[: args.sampled_prompts], args)
    result = {
        "benchmark": "acceptance",
        **describe(),
        "model": config.model_name,
        "dtype": args.dtype,
        "max_tokens": args.max_tokens,
        "prompts": len(prompts),
        "greedy": shapes,
        "sampled_prompts": min(args.sampled_prompts, len(prompts)),
        "sampled_tokens": args.sampled_tokens,
        "chain4_by_temperature": table,
    }
    print_result(args, result)


class _Runner:
    """Runs prompts through the client, several at a time, and returns the results in order."""

    def __init__(self, client: Client, concurrency: int) -> None:
        self._client = client
        self._concurrency = concurrency

    def run(self, prompts: list[BenchPrompt], **options: object) -> list[GenerateResult]:
        def one(prompt: BenchPrompt) -> GenerateResult:
            return self._client.generate([user(prompt.text)], **options)  # type: ignore[arg-type]

        with concurrent.futures.ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(one, prompts))


def _by_task(
    runner: _Runner, prompts: list[BenchPrompt], args: argparse.Namespace, shape: tuple[int, int]
) -> dict[str, object]:
    nodes, top_k = shape
    results = runner.run(
        prompts,
        max_tokens=args.max_tokens,
        temperature=0.0,
        drafter="eagle3",
        draft_tokens=nodes,
        draft_top_k=top_k,
    )
    tasks: dict[str, AcceptanceTally] = {}
    clean, every = AcceptanceTally(), AcceptanceTally()
    for prompt, result in zip(prompts, results, strict=True):
        every.add(result)
        if not is_loop(result.token_ids):
            clean.add(result)
            tasks.setdefault(prompt.task, AcceptanceTally()).add(result)
    print_progress(
        f"shape {shape}: {clean.mean} ({clean.answers} answers), with loops {every.mean}"
    )
    return {
        "mean_emitted_per_round": clean.mean,
        "answers": clean.answers,
        "with_loops": every.mean,
        "by_task": {name: tally.mean for name, tally in tasks.items()},
    }


def _by_temperature(
    runner: _Runner, prompts: list[BenchPrompt], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for rule in RULES:
        for temperature in TEMPERATURES:
            tally = AcceptanceTally()
            for result in runner.run(
                prompts,
                max_tokens=args.sampled_tokens,
                temperature=temperature,
                rule=rule,
                seed=1234,
                drafter="eagle3",
                draft_tokens=4,
            ):
                if not is_loop(result.token_ids):
                    tally.add(result)
            table.setdefault(rule, {})[str(temperature)] = tally.mean
            print_progress(f"{rule} T={temperature}: {tally.mean} ({tally.answers} answers)")
    return table
