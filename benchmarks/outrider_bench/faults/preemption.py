"""`outrider bench preemption`: one verifier with fewer KV blocks than its sessions need.

It measures plain decoding in this process, without a router:

* Throughput and texts of sessions that need four times as many blocks as there are. Two policies
  are compared: a session waits until all blocks that it may need are free, or it is admitted early
  and may be preempted.
* Time to first token of a session of higher priority, under this load and without it.
* Number of concurrent sessions whose answers are much shorter than their `max_tokens`, with blocks
  reserved in advance and with blocks allocated on demand.

Token ids of the prompts are random, because the measurements do not depend on them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.server.service import VerifierService

from outrider.client.local.model_files import find_model
from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionSpec
from outrider_bench.environment import describe
from outrider_bench.gpu.support.random_model import TINY, random_target
from outrider_bench.models import add_input_arguments
from outrider_bench.report import percentiles, print_progress, print_result

BLOCK: Final = 16
NODES: Final = 8
"""Maximum number of draft nodes. It is small, so that few blocks are reserved for drafts, compared
with those of an answer."""
URGENT_TOKENS: Final = 8
"""Length of an answer of higher priority, in tokens."""
PAUSE_S: Final = 0.05
"""Mean pause between two sessions of higher priority, in seconds."""
SHARE: Final = 4
"""Ratio of the blocks that all requests need to the blocks that the verifier has."""
PARTS: Final = ("crowd", "urgent", "at_once")
CONFIGURATIONS: Final[dict[str, dict[str, object]]] = {
    "waiting": {"max_preemptions": 0},
    "preemption": {},
    "swap": {"preemption": "swap"},
    "recompute": {"preemption": "recompute"},
}


@dataclass(slots=True)
class PreemptedAnswer:
    """Tokens of a session's answer, and the seconds from opening the session to its first token."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_input_arguments(parser)
    add = parser.add_argument
    add("--sessions", type=int, default=64)
    add("--prompt-tokens", type=int, default=96)
    add("--max-tokens", type=int, default=160, help="of the longest answer; the shortest has half")
    add("--urgent", type=int, default=100, help="sessions of a higher priority; default: 100")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--budget", type=int, default=2048, help="max_tokens of the answers that end early")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    torch.set_num_threads(args.threads)
    result: dict[str, object] = {"benchmark": "preemption", **describe(), "model": args.model}
    result |= {"sessions": args.sessions, "prompt_tokens": args.prompt_tokens}
    result |= {"max_tokens": args.max_tokens, "budget": args.budget, "block_tokens": BLOCK}
    parts = dict(zip(PARTS, (_crowd, _urgent, _at_once), strict=True))
    for name in args.parts:
        result[name] = asyncio.run(parts[name](args))
    print_result(args, result)


# ---- serving -------------------------------------------------------------------------------------


@asynccontextmanager
async def _serving(
    args: argparse.Namespace, blocks: int, **settings: object
) -> AsyncIterator[VerifierService]:
    """Serve a verifier with `blocks` KV blocks; stop it at the end."""
    kv_tokens = blocks * BLOCK
    target: TargetModel
    if args.model == "tiny":
        shape = replace(TINY, max_position_embeddings=8192)
        target = random_target(
            shape, dtype=torch.float32, device=torch.device("cpu"), kv_tokens=kv_tokens
        )
    else:
        target = load_target(find_model(args.model).path, kv_tokens=kv_tokens)
    config = VerifierConfig(
        model=args.model,
        max_sessions=args.sessions,
        max_waiting=2 * args.sessions,
        threads=args.threads,
        max_tree_nodes=NODES,
        **settings,  # type: ignore[arg-type]
    )
    service = VerifierService(config, target, pool=target.pool, max_context_len=8192)
    try:
        yield service
    finally:
        await service.stop()


def _spec(args: argparse.Namespace, number: int, max_new_tokens: int, name: str) -> SessionSpec:
    rng = np.random.default_rng(number)
    return SessionSpec(
        session_id=SessionId(f"{name}{number}"),
        epoch=0,
        token_ids=tuple(rng.integers(3, 500, args.prompt_tokens).tolist()),
        prompt_len=args.prompt_tokens,
        max_new_tokens=max_new_tokens,
        stop_token_ids=(),
        sampling=SamplingParams(),
        plan=SpeculationPlan(),
    )


async def _answer(
    service: VerifierService, spec: SessionSpec, leave_at: int = 0
) -> PreemptedAnswer:
    """Serve a session and return its answer. If `leave_at` is not 0, the client leaves after so
    many tokens."""
    answer, began = PreemptedAnswer(), time.perf_counter()
    async with aclosing(service.open_session(spec)) as events:
        async for event in events:
            if event.tokens and not answer.tokens:
                answer.first_s = time.perf_counter() - began
            answer.tokens += event.tokens
            if leave_at and len(answer.tokens) >= leave_at:
                break
    return answer


def _answers(args: argparse.Namespace) -> list[SessionSpec]:
    """Return the requests of all sessions. Their answers have from half of `max_tokens` to
    `max_tokens` tokens."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(args.max_tokens // 2, args.max_tokens + 1, args.sessions)
    return [_spec(args, i, int(length), "s") for i, length in enumerate(lengths)]


def _blocks_of(specs: Sequence[SessionSpec]) -> int:
    return sum(-(-(len(s.token_ids) + s.max_new_tokens) // BLOCK) for s in specs)


def _preemptions(service: VerifierService) -> dict[str, int]:
    counters = service.core.counters
    return {way: counters[f"preemptions_{way}"] for way in ("swap", "recompute")}


# ---- a crowd -------------------------------------------------------------------------------------


async def _crowd(args: argparse.Namespace) -> dict[str, object]:
    specs = _answers(args)
    blocks = _blocks_of(specs)
    print_progress(f"{len(specs)} sessions with all {blocks} blocks that they need")
    calm, figures = await _all(args, specs, blocks + len(specs), {"max_preemptions": 0})
    found: dict[str, object] = {"blocks": blocks // SHARE, "calm": figures}
    for way, settings in CONFIGURATIONS.items():
        print_progress(f"{len(specs)} sessions with {blocks // SHARE} blocks: {way}")
        answers, figures = await _all(args, specs, blocks // SHARE, settings)
        changed = sum(a.tokens != b.tokens for a, b in zip(answers, calm, strict=True))
        found[way] = figures | {"texts_changed": changed}
    return found


async def _all(
    args: argparse.Namespace, specs: list[SessionSpec], blocks: int, settings: dict[str, object]
) -> tuple[list[PreemptedAnswer], dict[str, object]]:
    async with _serving(args, blocks, **settings) as service:
        await _answer(service, _spec(args, 0, 4, "warm up "))
        began, computed = time.perf_counter(), time.process_time()
        answers = await asyncio.gather(*(_answer(service, spec) for spec in specs))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - computed
        count = sum(len(answer.tokens) for answer in answers)
        return list(answers), {
            "seconds": round(seconds, 2),
            "tokens_per_s": round(count / seconds, 1),
            # Other work on the machine does not count.
            "tokens_per_cpu_s": round(count / cpu_s, 1),
            "first_token_s": percentiles([answer.first_s for answer in answers]),
            "preemptions": _preemptions(service),
            "most_preemptions_of_one": service.core.block_manager.max_session_preemptions,
            "blocks_leaked": blocks - (await service.info()).kv_free_blocks,
        }


# ---- a higher priority ---------------------------------------------------------------------------


async def _urgent(args: argparse.Namespace) -> dict[str, object]:
    """Measure sessions of higher priority one by one, alone and then under continuous load."""
    blocks = _blocks_of(_answers(args)) // SHARE
    found: dict[str, object] = {"blocks": blocks}
    medians: list[dict[str, float]] = []
    for name, crowd in (("alone", 0), ("in_the_crowd", args.sessions)):
        print_progress(f"{args.urgent} sessions of a higher priority, {name}")
        async with _serving(args, blocks) as service:
            async with _busy(args, service, crowd):
                times = await _first_tokens(args, service)
            figures = percentiles(times)
            medians.append(figures)
            found[name] = {"first_token_s": figures, "preemptions": _preemptions(service)}
    alone, crowded = medians
    found["ratio"] = {name: round(crowded[name] / alone[name], 2) for name in alone}
    return found


@asynccontextmanager
async def _busy(
    args: argparse.Namespace, service: VerifierService, count: int
) -> AsyncIterator[None]:
    """Keep `count` sessions of priority 0 open. The context is entered once a part of them has
    finished."""

    async def on_and_on(first: SessionSpec) -> None:
        for turn in range(1 << 20):
            await _answer(
                service, replace(first, session_id=SessionId(f"{first.session_id}-{turn}"))
            )

    tasks = [asyncio.create_task(on_and_on(spec)) for spec in _answers(args)[:count]]
    try:
        while service.core.counters["finished"] < count // SHARE:
            await asyncio.sleep(0.05)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _first_tokens(args: argparse.Namespace, service: VerifierService) -> list[float]:
    rng = np.random.default_rng(2)
    times: list[float] = []
    for number in range(args.urgent + 1):
        spec = replace(_spec(args, number, URGENT_TOKENS, "urgent"), priority=1)
        times.append((await _answer(service, spec)).first_s)
        await asyncio.sleep(float(rng.exponential(PAUSE_S)))
    # The first one warms up.
    return times[1:]


# ---- answers that end early ----------------------------------------------------------------------


async def _at_once(args: argparse.Namespace) -> dict[str, object]:
    """Measure how many sessions run concurrently, with blocks for four answers of `budget` tokens.
    Each session may emit `budget` tokens, but its client leaves after 100 to 200."""
    slack = NODES + BLOCK
    blocks = 4 * -(-(args.prompt_tokens + args.budget + slack) // BLOCK) + 4
    found: dict[str, object] = {"blocks": blocks}
    mean: dict[str, float] = {}
    for way, settings in (
        ("reservation", CONFIGURATIONS["waiting"]),
        ("on_demand", CONFIGURATIONS["preemption"]),
    ):
        print_progress(f"answers of 100 to 200 of {args.budget} tokens, {blocks} blocks: {way}")
        async with _serving(args, blocks, **settings) as service:
            rng = np.random.default_rng(3)
            tasks = [
                asyncio.create_task(
                    _answer(service, _spec(args, i, args.budget, "s"), int(rng.integers(100, 201)))
                )
                for i in range(args.sessions)
            ]
            began, seen = time.perf_counter(), list[int]()
            core = service.core
            while (
                core.counters["sessions"] < args.sessions or core.block_manager.waiting or not seen
            ):
                await asyncio.sleep(0.02)
                seen.append(len(core.block_manager.running))
            await asyncio.gather(*tasks)
            seconds = time.perf_counter() - began
            mean[way] = statistics.fmean(seen)
            found[way] = {
                "sessions_at_once": {"mean": round(mean[way], 1), "most": max(seen)},
                "seconds": round(seconds, 2),
                "preemptions": _preemptions(service),
            }
    found["ratio"] = round(mean["on_demand"] / mean["reservation"], 2)
    return found
