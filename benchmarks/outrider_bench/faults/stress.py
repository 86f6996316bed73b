"""`outrider bench stress`: requests that are cancelled, time out or are never read.

Requests are cancelled at random moments (queued, in prefill, in a round) or ended by a deadline, or
their clients do not read the answers. Meanwhile the texts of a few normal requests are compared
with the texts that the same fleet generated before the load. After the load the fleet must hold no
resources.
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

SMALL_WINDOW_OPTIONS = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""Options of a gRPC channel that buffers little data which its client has not read yet."""
NEVER_S = 120.0
"""Timeout of requests whose clients do not read, in seconds; the router must end them earlier."""
NUM_COMPARED = 4
"""Number of normal requests that are sent during the load, and whose texts are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--cancelled", type=int, default=10_000, help="number of requests that their clients cancel"
    )
    add("--deadlines", type=int, default=1_000, help="number of requests that a deadline ends")
    add("--slow", type=int, default=1_000, help="number of requests whose clients do not read")
    add("--concurrency", type=int, default=64, help="requests in flight at a time")
    add("--max-sessions", type=int, default=32, help="sessions that the verifier serves at a time")
    add(
        "--max-tokens", type=int, default=256, help="max_tokens of cancelled and timed-out requests"
    )
    add("--slow-tokens", type=int, default=1024, help="max_tokens of requests that are not read")
    add(
        "--slow-reader-timeout-s",
        type=float,
        default=2.0,
        help="time after which the router ends a stream that its client does not read",
    )
    add(
        "--batches",
        type=int,
        default=20,
        help="number of batches of requests; memory is measured after each",
    )
    add("--seed", type=int, default=0, help="seed of the order, the prompts and the moments")


class StressLoad:
    """Sends requests to one router and counts how they end."""

    def __init__(
        self, client: AsyncClient, small_window_channel: grpc.aio.Channel, args: argparse.Namespace
    ):
        """Prepare the load. `small_window_channel` is a channel to the router with
        SMALL_WINDOW_OPTIONS, for the clients that do not read."""
        self._client, self._small_window_channel = client, small_window_channel
        self._prompts = load_prompts(args.prompts, args.limit)
        self._options: GenerateOptions = {"max_tokens": args.max_tokens, "ignore_eos": True}
        self._slow_options: GenerateOptions = {**self._options, "max_tokens": args.slow_tokens}
        self._slow_reader_timeout_s = args.slow_reader_timeout_s
        self._rng = random.Random(args.seed)
        self._request_duration_s = 0.2
        """Estimated duration of a request, in seconds."""
        self.codes: Counter[str] = Counter()

    async def reference_texts(self) -> list[str]:
        """Return NUM_COMPARED texts that are generated with fixed seeds. They must be the same
        under load."""
        began = time.monotonic()
        asked = [
            self._client.generate([user(prompt.text)], max_tokens=32, temperature=0.8, seed=number)
            for number, prompt in enumerate(self._prompts[:NUM_COMPARED])
        ]
        found = [answer.text for answer in await asyncio.gather(*asked)]
        self._request_duration_s = min(1.0, max(0.05, time.monotonic() - began))
        return found

    async def run(self, kinds: list[str], concurrency: int) -> None:
        """Send one request for each entry of `kinds` ("cancelled", "deadline" or "slow"), at most
        `concurrency` of them at a time, and count how they end."""
        bound = asyncio.Semaphore(concurrency)
        ways = {"cancelled": self._cancelled, "deadline": self._deadline, "slow": self._slow}

        async def one(kind: str) -> None:
            async with bound:
                self.codes[f"{kind} {await ways[kind]()}"] += 1

        await asyncio.gather(*map(one, kinds))

    async def _cancelled(self) -> str:
        """Cancel a request at a random moment, by closing its stream or by its id."""
        delay_s = self._rng.choice((0.0, self._rng.uniform(0.0, 2.0 * self._request_duration_s)))
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
        limit_s = self._rng.uniform(0.001, self._request_duration_s)
        try:
            await self._client.generate(self._prompt(), timeout_s=limit_s, **self._options)
        except OutriderError as error:
            return error.code
        return "OK"

    async def _slow(self) -> str:
        """Open a stream and pause before reading on, long enough that the router may end the
        stream. Half of the clients then read on, the others leave."""
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        method = self._small_window_channel.unary_stream(GENERATE_STREAM.path)
        request = GENERATE_STREAM.encode(make_request(self._prompt(), self._slow_options))
        call = method(request, timeout=NEVER_S)
        try:
            await call.read()
            await asyncio.sleep(
                self._rng.uniform(0.0, 3.0)
                * (self._slow_reader_timeout_s + self._request_duration_s)
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
    """Run the benchmark and print its result."""
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
        grpc.aio.insecure_channel(
            cluster.address, options=SMALL_WINDOW_OPTIONS
        ) as small_window_channel,
    ):
        load = StressLoad(client, small_window_channel, args)
        expected_texts = await load.reference_texts()
        await load.run(kinds[: 2 * args.concurrency], args.concurrency)
        before = await asyncio.to_thread(wait_idle, cluster)
        load.codes.clear()
        usage, began, changed = UsageSeries(), time.monotonic(), 0
        for start in range(0, len(kinds), size):
            batch = kinds[start : start + size]
            found, _ = await asyncio.gather(
                load.reference_texts(), load.run(batch, args.concurrency)
            )
            changed += sum(text != known for text, known in zip(found, expected_texts, strict=True))
            usage.add(await asyncio.to_thread(wait_idle, cluster), float(start + len(batch)))
            print_progress(f"{start + len(batch)} requests: {usage.looks[-1]}")
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
            name: round(1000.0 * kb, 1) for name, kb in usage.slopes_kb().items()
        },
    }
