"""`outrider bench soak`: long run with many concurrent streams, which reports errors and memory
growth."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter

from outrider.client import AsyncClient, OutriderError, RetryPolicy, user
from outrider.client.local.cluster import LocalCluster
from outrider_bench.environment import describe
from outrider_bench.faults.resource_usage import (
    UsageSeries,
    check_proc,
    describe_leaks,
    measure_usage,
    wait_idle,
)
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import load_prompts
from outrider_bench.report import percentiles, print_progress, print_result

WARM_SHARE = 0.1
"""Share of the run's duration that passes before the first sample of memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    parser.add_argument("--streams", type=int, default=256, help="at a time, in a closed loop")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--look-s", type=float, default=5.0, help="time between looks at memory")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    check_proc()
    config = local_config(args, max_sessions=args.streams, queue_limit=args.streams)
    with LocalCluster(config) as cluster:
        figures = asyncio.run(_soak(cluster, args))
    print_result(args, {"benchmark": "soak", **describe(), **describe_placement(config), **figures})


async def _soak(cluster: LocalCluster, args: argparse.Namespace) -> dict[str, object]:
    prompts = load_prompts(args.prompts, args.limit)
    codes: Counter[str] = Counter()
    first_s: list[float] = []
    tokens = 0
    end = time.monotonic() + 60.0 * args.minutes

    async def follow(client: AsyncClient, number: int) -> None:
        nonlocal tokens
        while (began := time.monotonic()) < end:
            prompt = [user(prompts[number % len(prompts)].text)]
            number += args.streams
            heard = 0
            try:
                async with client.stream(
                    prompt, max_tokens=args.max_tokens, ignore_eos=True
                ) as stream:
                    async for delta in stream:
                        if not heard:
                            first_s.append(time.monotonic() - began)
                        heard += len(delta.token_ids)
                codes["OK" if heard == args.max_tokens else "SHORT"] += 1
            except OutriderError as error:
                codes[error.code] += 1
            tokens += heard

    before = await asyncio.to_thread(wait_idle, cluster)
    async with AsyncClient(cluster.address, retry=RetryPolicy(max_attempts=1)) as client:
        watching = asyncio.create_task(_watch(cluster, args))
        await asyncio.gather(*(follow(client, number) for number in range(args.streams)))
        watching.cancel()
        course = await watching
    after = await asyncio.to_thread(wait_idle, cluster)
    return {
        "streams": args.streams,
        "minutes": args.minutes,
        "codes": dict(codes),
        "tokens_per_s": round(tokens / (60.0 * args.minutes), 1),
        "first_token_s": percentiles(first_s),
        "leaks": describe_leaks(before, after),
        "rss_kb_first": course.looks[0].rss_kb if course.looks else {},
        "rss_kb_last": course.looks[-1].rss_kb if course.looks else {},
        "rss_kb_per_minute_second_half": course.slopes_kb(),
    }


async def _watch(cluster: LocalCluster, args: argparse.Namespace) -> UsageSeries:
    """Sample the fleet's usage until cancelled; return the samples."""
    course, began = UsageSeries(), time.monotonic()
    try:
        await asyncio.sleep(60.0 * args.minutes * WARM_SHARE)
        while True:
            held = await asyncio.to_thread(measure_usage, cluster)
            course.add(held, (held.at_s - began) / 60.0)
            print_progress(f"{course.done[-1]:.1f} min: {held}")
            await asyncio.sleep(args.look_s)
    except asyncio.CancelledError:
        return course
