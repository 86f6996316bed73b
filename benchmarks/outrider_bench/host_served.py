"""What a verifier's process can serve, its device aside: rounds a second with routers that listen.

As `host_own`, but with its threads, its port and routers in processes of their own, which keep all
sessions open and read their events. The device takes no time, so what is found is how fast the
process is: its engine thread and its event loop share one interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import torch
from outrider_verifier.service import VerifierService

from outrider.errors import UnavailableError
from outrider.process import tune_process
from outrider.spec.plan import DraftMethod, Plan
from outrider.transport.grpc import GrpcConfig, GrpcDialer, GrpcServer, verifier_services
from outrider.wire.messages import SessionEvents, SessionOpen
from outrider_bench.host_canned import Steps
from outrider_bench.host_verifier import PROMPT, VerifierSide, spec_of
from outrider_bench.report import table

ANSWER: Final = 1800
"""Tokens; a session that ends is replaced."""
WARM_S: Final = 3.0
READY_S: Final = 60.0


async def serve(
    sessions: int,
    routers: int,
    length: int,
    seconds: float,
    *,
    lanes: bool,
    warm_s: float = WARM_S,
) -> None:
    """Print rounds a second and microseconds of the processor a round, of each thread. `length`:
    tokens of an own draft."""
    with torch.inference_mode():
        side = VerifierSide(sessions, Steps(), planner="automatic", own_draft=length)
    service = side.service
    tune_process()
    service.start()
    config = GrpcConfig(lanes=lanes)
    server = GrpcServer("127.0.0.1:0", verifier_services(service, config), config=config)
    address = await server.start()
    with contextlib.ExitStack() as stack:
        for number in range(routers):
            share = sessions // routers + (number < sessions % routers)
            flags = [address, str(number), str(share), str(length), *(["lanes"] if lanes else [])]
            process = subprocess.Popen([sys.executable, "-m", "outrider_bench.host_served", *flags])
            stack.enter_context(process)
            stack.callback(process.kill)
        async with asyncio.timeout(READY_S):
            while (await service.info()).sessions < sessions:
                await asyncio.sleep(0.05)
        await asyncio.sleep(warm_s)
        before = await _counts(service)
        await asyncio.sleep(seconds)
        after = await _counts(service)
    rounds, *spent = (now - then for now, then in zip(after, before, strict=True))
    if rounds <= 0:
        raise UnavailableError("no round was served", reason="NO_ROUNDS")
    each = [f"{1e6 * value / rounds:.0f}" for value in spent[1:]]
    rate = f"{rounds / spent[0]:.0f}"
    headers = ["sessions", "routers", "lanes", "rounds/s", "engine us", "event loop us"]
    print(table(headers, [[str(sessions), str(routers), str(lanes), rate, *each]]))
    await service.stop()
    await server.stop(0.1)


async def _counts(service: VerifierService) -> tuple[float, ...]:
    """Rounds; seconds of the clock, of the engine thread, of this one."""
    (engine,) = [t for t in threading.enumerate() if t.name == "outrider-engine"]
    return (
        float((await service.info()).rounds_total),
        time.monotonic(),
        _thread_s(engine.native_id),
        time.thread_time(),
    )


def _thread_s(number: int | None) -> float:
    text = Path(f"/proc/self/task/{number}/schedstat").read_text()
    return float(text.split()[0]) / 1e9


async def listen(address: str, name: str, sessions: int, length: int, *, lanes: bool) -> None:
    """Be a router: keep so many sessions open and read what they emit."""
    dialer = GrpcDialer(GrpcConfig(lanes=lanes))
    stream = await (await dialer.verifier(address)).sessions()
    plan = Plan(method=DraftMethod.EAGLE3, draft_tokens=length) if length else Plan()
    opened = 0

    async def open_one() -> None:
        nonlocal opened
        await stream.send(SessionOpen(opened, spec_of(f"{name}-{opened}", PROMPT, ANSWER, plan)))
        opened += 1

    for _ in range(sessions):
        await open_one()
    while True:
        for message in (await stream.receive(), *stream.ready()):
            if isinstance(message, SessionEvents):
                for _ in range(int((message.finish_reasons > 0).sum())):
                    await open_one()


def run(args: argparse.Namespace) -> None:
    """Measure with each number of sessions."""
    for count in [int(sessions) for sessions in args.sessions.split(",")]:
        asyncio.run(serve(count, args.routers, args.own, args.seconds, lanes=args.lanes))


if __name__ == "__main__":
    _address, _name, _sessions, _length, *_lanes = sys.argv[1:]
    asyncio.run(listen(_address, _name, int(_sessions), int(_length), lanes=bool(_lanes)))
