"""`outrider bench load`: concurrent streams, first with a session for each, then with too short a
queue.

In the first run all streams must complete. In the second run the router queues some requests and
refuses the rest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import time
from collections import Counter
from dataclasses import dataclass

from outrider.client import Client, OutriderError, RetryPolicy, ServerInfo, user
from outrider.client.local.cluster import LocalCluster
from outrider_bench.environment import describe
from outrider_bench.models import add_model_arguments, local_config
from outrider_bench.prompts import BenchPrompt, load_prompts
from outrider_bench.report import print_progress, print_result

SETTLE_S = 5.0
"""Seconds after the end of the last stream. Resources that are still held then count as leaked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStream:
    """Error code ("OK" for success), number of tokens and times of one stream. Times are in
    seconds."""

    code: str
    tokens: int
    first_token_s: float
    total_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--short-queue", type=int, default=16)
    parser.add_argument("--short-sessions", type=int, default=8)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    prompts = load_prompts(args.prompts, args.limit)
    print_progress(f"{args.streams} streams, room for all")
    wide = _burst(args, prompts, max_sessions=args.streams, queue_limit=args.streams)
    print_progress(
        f"{args.streams} streams, {args.short_sessions} sessions, queue of {args.short_queue}"
    )
    short = _burst(args, prompts, max_sessions=args.short_sessions, queue_limit=args.short_queue)
    result = {"benchmark": "load", **describe(), "streams": args.streams}
    result |= {"max_tokens": args.max_tokens, "room_for_all": wide, "short_queue": short}
    print_result(args, result)


def _burst(
    args: argparse.Namespace, prompts: list[BenchPrompt], *, max_sessions: int, queue_limit: int
) -> dict[str, object]:
    with LocalCluster(
        local_config(args, max_sessions=max_sessions, queue_limit=queue_limit)
    ) as cluster:
        retry = RetryPolicy(max_attempts=1)
        with Client(cluster.address, timeout_s=900.0, retry=retry) as client:
            began = time.perf_counter()

            def one(index: int) -> LoadedStream:
                return _stream(client, prompts[index % len(prompts)], args.max_tokens)

            with concurrent.futures.ThreadPoolExecutor(args.streams) as pool:
                results = list(pool.map(one, range(args.streams)))
            seconds = time.perf_counter() - began
            idle = _wait_idle(client)
    done = [result for result in results if result.code == "OK"]
    first = sorted(result.first_token_s for result in done)
    return {
        "max_sessions": max_sessions,
        "queue_limit": queue_limit,
        "codes": dict(Counter(result.code for result in results)),
        "tokens_per_s": round(sum(result.tokens for result in done) / seconds, 1),
        "first_token_s_p50": round(statistics.median(first), 2) if first else None,
        "first_token_s_max": round(first[-1], 2) if first else None,
        "total_s_max": round(max(result.total_s for result in results), 2),
        "sessions_left": sum(verifier.sessions for verifier in idle.verifiers),
        "kv_blocks_leaked": sum(v.kv_total_blocks - v.kv_free_blocks for v in idle.verifiers),
    }


def _wait_idle(client: Client) -> ServerInfo:
    """Wait until the verifiers have no sessions, at most SETTLE_S; return the fleet's state. The
    router polls its verifiers every half second."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        info = client.server_info()
        if time.monotonic() > deadline or all(v.sessions == 0 for v in info.verifiers):
            return info
        time.sleep(0.1)


def _stream(client: Client, prompt: BenchPrompt, max_tokens: int) -> LoadedStream:
    began = time.perf_counter()
    first, tokens = 0.0, 0
    try:
        with client.stream(
            [user(prompt.text)], max_tokens=max_tokens, ignore_eos=True, temperature=0.0
        ) as stream:
            for delta in stream:
                first = first or time.perf_counter() - began
                tokens += len(delta.token_ids)
    except OutriderError as error:
        total_s = time.perf_counter() - began
        return LoadedStream(code=error.code, tokens=tokens, first_token_s=first, total_s=total_s)
    total_s = time.perf_counter() - began
    return LoadedStream(code="OK", tokens=tokens, first_token_s=first, total_s=total_s)
