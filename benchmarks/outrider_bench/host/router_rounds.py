"""Rounds per second of a verifier process with routers connected, without device time.

Rounds are those of `outrider_bench.host.in_process`, but the verifier runs its own threads and
serves a port. Routers in separate processes keep all sessions open, replace those that end, and
read their events. The device takes no time, so the result is the speed of the verifier process,
whose engine thread and event loop share one Python interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import torch
from outrider_verifier.server.service import VerifierService

from outrider.errors import UnavailableError
from outrider.process_tuning import tune_process
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.grpc import GrpcConfig, GrpcDialer, GrpcServer, verifier_services
from outrider.wire.messages import SessionEvents, SessionOpen
from outrider_bench.host.fake_device import Steps
from outrider_bench.host.scripted_verifier import PROMPT, VerifierSide, spec_of
from outrider_bench.report import format_table

ANSWER: Final = 1800
"""Number of tokens of an answer if `answers` is 0. A session that ends is replaced."""
SPREAD: Final = (0.5, 1.5)
"""Shortest and longest answer, relative to the mean length."""
OPENED: Final = 0.75
"""Share of the sessions that must be open before the measurement begins."""
WARM_S: Final = 3.0
READY_S: Final = 60.0


async def measure_rounds(
    sessions: int,
    routers: int,
    length: int,
    seconds: float,
    *,
    answers: int,
    shm_channels: bool,
    warm_s: float = WARM_S,
) -> None:
    """Measure a verifier with `sessions` sessions from `routers` router processes for `seconds`.
    Print the rounds per second, and the processor microseconds per round of the engine thread and
    of the event loop.

    `length` is the number of tokens of an in-process draft. `answers` is the mean number of tokens
    of an answer; with 0 every answer has ANSWER tokens.
    """
    with torch.inference_mode():
        side = VerifierSide(
            sessions,
            Steps(),
            planner="automatic",
            in_process_draft=length,
            drives_rounds=False,
        )
    service = side.service
    tune_process()
    service.start()
    config = GrpcConfig(shm_channels=shm_channels)
    server = GrpcServer("127.0.0.1:0", verifier_services(service, config), config=config)
    address = await server.start()
    with contextlib.ExitStack() as stack:
        for number in range(routers):
            share = sessions // routers + (number < sessions % routers)
            facts = (address, number, share, length, answers)
            flags = [*map(str, facts), *(["shared memory"] if shm_channels else [])]
            process = subprocess.Popen(
                [sys.executable, "-m", "outrider_bench.host.router_rounds", *flags]
            )
            stack.enter_context(process)
            stack.callback(process.kill)
        async with asyncio.timeout(READY_S):
            # Of answers that end some are always yet to be replaced.
            while (await service.info()).sessions < OPENED * sessions:
                await asyncio.sleep(0.05)
        await asyncio.sleep(warm_s)
        before = await _counts(service)
        await asyncio.sleep(seconds)
        after = await _counts(service)
    rounds, *spent = (now - then for now, then in zip(after, before, strict=True))
    if rounds <= 0:
        raise UnavailableError("no round was served", reason="NO_ROUNDS")
    each = [f"{1e6 * value / rounds:.0f}" for value in spent[1:-1]]
    rate = f"{rounds / spent[0]:.0f}"
    headers = ["sessions", "routers", "shared memory", "rounds/s", "ended a round", "engine us"]
    found = [
        str(sessions),
        str(routers),
        str(shm_channels),
        rate,
        f"{spent[-1] / rounds:.2f}",
        *each,
    ]
    print(format_table([*headers, "event loop us"], [found]))
    await service.stop()
    await server.stop(0.1)


async def _counts(service: VerifierService) -> tuple[float, ...]:
    """Return the totals at this moment: rounds, seconds of the clock, processor seconds of the
    engine thread and of this thread, and ended sessions."""
    (engine,) = [t for t in threading.enumerate() if t.name == "outrider-engine"]
    return (
        float((await service.info()).rounds_total),
        time.monotonic(),
        _thread_s(engine.native_id),
        time.thread_time(),
        float(service.core.counters["finished"]),
    )


def _thread_s(number: int | None) -> float:
    text = Path(f"/proc/self/task/{number}/schedstat").read_text()
    return float(text.split()[0]) / 1e9


async def run_router(
    address: str, name: str, sessions: int, length: int, answers: int, *, shm_channels: bool
) -> None:
    """Act as a router: keep `sessions` sessions open and read their events. `length` and `answers`
    are the same as for `measure_rounds`."""
    dialer = GrpcDialer(GrpcConfig(shm_channels=shm_channels))
    stream = await (await dialer.verifier(address)).sessions()
    plan = (
        SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=length)
        if length
        else SpeculationPlan()
    )
    opened, lengths = 0, random.Random(name)

    async def open_one() -> None:
        nonlocal opened
        tokens = max(1, round(lengths.uniform(*SPREAD) * answers)) if answers else ANSWER
        await stream.send(SessionOpen(opened, spec_of(f"{name}-{opened}", PROMPT, tokens, plan)))
        opened += 1

    for _ in range(sessions):
        await open_one()
    while True:
        for message in (await stream.receive(), *stream.receive_ready()):
            if isinstance(message, SessionEvents):
                for _ in range(int((message.finish_reasons > 0).sum())):
                    await open_one()


def run(args: argparse.Namespace) -> None:
    """Measure and print each number of sessions that --sessions lists."""
    for count in [int(sessions) for sessions in args.sessions.split(",")]:
        served = measure_rounds(
            *(count, args.routers, args.own, args.seconds),
            answers=args.answers,
            shm_channels=args.shared_memory,
        )
        asyncio.run(served)


if __name__ == "__main__":
    _address, _name, _sessions, _length, _answers, *_lanes = sys.argv[1:]
    _numbers = (int(_sessions), int(_length), int(_answers))
    asyncio.run(run_router(_address, _name, *_numbers, shm_channels=bool(_lanes)))
