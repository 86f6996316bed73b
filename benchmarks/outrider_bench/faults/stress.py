"""`outrider bench stress`: requests that are cancelled, time out or are never read.

Requests are cancelled at random moments (queued, in prefill, in a round), ended by a deadline, or
never read; afterwards the fleet may hold no resources. Meanwhile the texts of normal streams are
compared with those of an undisturbed fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import time
from collections import Counter

import grpc

from outrider.client import AsyncClient, OutriderError, RetryPolicy, user
from outrider.client.local.cluster import LocalCluster
from outrider.client.options import GenerateOptions, make_request
from outrider.client.rpcs import GENERATE_STREAM, to_typed_error
from outrider.errors import InternalError
from outrider.wire.inference import ChatMessage
from outrider_bench.environment import describe
from outrider_bench.faults.resource_usage import (
    UsageSeries,
    check_proc,
    describe_leaks,
    wait_idle,
)
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import load_prompts
from outrider_bench.report import print_progress, print_result

NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""A client whose transport takes in no more than what is read."""
NEVER_S = 120.0
"""A stream that nobody reads must be over by then."""
MATCHED = 4
"""Streams beside the others whose texts are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--cancelled", type=int, default=10_000, help="requests that their clients cancel")
    add("--deadlines", type=int, default=1_000, help="requests that a deadline ends")
    add("--slow", type=int, default=1_000, help="requests whose clients do not read")
    add("--concurrency", type=int, default=64, help="requests at a time")
    add("--max-sessions", type=int, default=32, help="of the verifier; the others wait")
    add("--max-tokens", type=int, default=256)
    add("--slow-tokens", type=int, default=1024, help="of answers that are not read")
    add("--slow-reader-timeout-s", type=float, default=2.0, help="proposal timeout of the router")
    add("--batches", type=int, default=20, help="looks at memory on the way")
    add("--seed", type=int, default=0)


class StressLoad:
    """Requests against one router, and their results."""

    def __init__(self, client: AsyncClient, narrow: grpc.aio.Channel, args: argparse.Namespace):
        """`narrow` takes in no more than what is read."""
        self._client, self._narrow = client, narrow
        self._prompts = load_prompts(args.prompts, args.limit)
        self._options: GenerateOptions = {"max_tokens": args.max_tokens, "ignore_eos": True}
        self._slow_options: GenerateOptions = {**self._options, "max_tokens": args.slow_tokens}
        self._slow_reader_timeout_s = args.slow_reader_timeout_s
        self._rng = random.Random(args.seed)
        self._lasts_s = 0.2
        """About how long an answer takes."""
        self.codes: Counter[str] = Counter()

    async def texts(self) -> list[str]:
        """A few answers that nothing may change."""
        began = time.monotonic()
        asked = [
            self._client.generate([user(prompt.text)], max_tokens=32, temperature=0.8, seed=number)
            for number, prompt in enumerate(self._prompts[:MATCHED])
        ]
        found = [answer.text for answer in await asyncio.gather(*asked)]
        self._lasts_s = min(1.0, max(0.05, time.monotonic() - began))
        return found

    async def run(self, kinds: list[str], concurrency: int) -> None:
        """So many requests of these kinds at a time."""
        bound = asyncio.Semaphore(concurrency)
        ways = {"cancelled": self._cancelled, "deadline": self._deadline, "slow": self._slow}

        async def one(kind: str) -> None:
            async with bound:
                self.codes[f"{kind} {await ways[kind]()}"] += 1

        await asyncio.gather(*map(one, kinds))

    async def _cancelled(self) -> str:
        """By closing the stream or by id, at any moment."""
        delay_s = self._rng.choice((0.0, self._rng.uniform(0.0, 2.0 * self._lasts_s)))
        request_id = f"stress-{self._rng.getrandbits(64):x}"
        options: GenerateOptions = {**self._options, "request_id": request_id}
        stream = self._client.stream(self._prompt(), **options)
        reading = asyncio.create_task(stream.result())
        await asyncio.sleep(delay_s)
        if self._rng.random() < 0.2:
            await self._client.abort([request_id])
        else:
            await stream.close()
        try:
            await reading
        except InternalError:
            return "closed"
        except OutriderError as error:
            return error.code
        return "OK"

    async def _deadline(self) -> str:
        limit_s = self._rng.uniform(0.001, self._lasts_s)
        try:
            await self._client.generate(self._prompt(), timeout_s=limit_s, **self._options)
        except OutriderError as error:
            return error.code
        return "OK"

    async def _slow(self) -> str:
        """Opened and not read until the router may have given it up; some then read the end."""
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        method = self._narrow.unary_stream(GENERATE_STREAM.path)
        request = GENERATE_STREAM.encode(make_request(self._prompt(), self._slow_options))
        call = method(request, timeout=NEVER_S)
        try:
            await call.read()
            await asyncio.sleep(
                self._rng.uniform(0.0, 3.0) * (self._slow_reader_timeout_s + self._lasts_s)
            )
            if self._rng.random() < 0.5:
                return "left"
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return to_typed_error(error, "the router").reason
        finally:
            call.cancel()
        return "OK"

    def _prompt(self) -> list[ChatMessage]:
        return [user(self._rng.choice(self._prompts).text * self._rng.choice((1, 1, 3)))]


def run(args: argparse.Namespace) -> None:
    """Measure and report."""
    check_proc()
    config = dataclasses.replace(
        local_config(args, max_sessions=args.max_sessions, queue_limit=args.concurrency),
        slow_reader_timeout_s=args.slow_reader_timeout_s,
    )
    with LocalCluster(config) as cluster:
        figures = asyncio.run(_stress(cluster, args))
    result = {"benchmark": "stress", **describe(), **describe_placement(config), **figures}
    print_result(args, result)
    if figures["leaks"] or figures["changed_texts"]:
        raise InternalError(f"leaks: {figures['leaks']}", reason="LEAKS")


async def _stress(cluster: LocalCluster, args: argparse.Namespace) -> dict[str, object]:
    counts = {"cancelled": args.cancelled, "deadline": args.deadlines, "slow": args.slow}
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(args.seed).shuffle(kinds)
    size = max(1, -(-len(kinds) // args.batches))
    once = RetryPolicy(max_attempts=1)
    async with (
        AsyncClient(cluster.address, retry=once) as client,
        grpc.aio.insecure_channel(cluster.address, options=NARROW) as narrow,
    ):
        load = StressLoad(client, narrow, args)
        calm = await load.texts()
        await load.run(kinds[: 2 * args.concurrency], args.concurrency)
        before = await asyncio.to_thread(wait_idle, cluster)
        load.codes.clear()
        course, began, changed = UsageSeries(), time.monotonic(), 0
        for start in range(0, len(kinds), size):
            batch = kinds[start : start + size]
            found, _ = await asyncio.gather(load.texts(), load.run(batch, args.concurrency))
            changed += sum(text != known for text, known in zip(found, calm, strict=True))
            course.add(await asyncio.to_thread(wait_idle, cluster), float(start + len(batch)))
            print_progress(f"{start + len(batch)} requests: {course.looks[-1]}")
        seconds = time.monotonic() - began
    after = await asyncio.to_thread(wait_idle, cluster)
    return {
        "requests": len(kinds),
        "seconds": round(seconds, 1),
        "concurrency": args.concurrency,
        "codes": dict(sorted(load.codes.items())),
        "changed_texts": changed,
        "leaks": describe_leaks(before, after),
        "rss_kb_before": before.rss_kb,
        "rss_kb_after": after.rss_kb,
        "rss_kb_per_1000_requests": {
            name: round(1000.0 * kb, 1) for name, kb in course.slopes_kb().items()
        },
    }
