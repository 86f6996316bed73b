"""`outrider bench rolling`: rolling restart of all processes of a fleet under load.

The fleet has two verifiers, two drafters and a router with a journal. As operations.md describes,
each process in turn gets SIGTERM, exits and is started again on the same address. The next process
follows once the router sees all processes. Each client has a connection of its own and sends its
next request as soon as it has received an answer. It retries and resumes as the client library does
by default. No request may fail, and every text must equal that of a run without restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.client import AsyncClient, OutriderError, user
from outrider.client.local.child_process import ChildProcess
from outrider.client.local.cluster import START_TIMEOUT_S, LocalCluster
from outrider.client.options import GenerateOptions
from outrider.errors import InternalError, UnavailableError
from outrider.wire.inference import ChatMessage
from outrider_bench.environment import describe
from outrider_bench.faults.repair import spare_fleet_config, wait_idle, wait_serving
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import load_prompts
from outrider_bench.report import percentiles, print_progress, print_result

ASK_S = 300.0
"""Seconds after which a request without an answer has failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--sessions", type=int, default=32, help="that ask on and on; default: 32")
    add("--turns", type=int, default=3, help="restarts of each process; default: 3")
    add("--max-tokens", type=int, default=64)
    add("--between-s", type=float, default=1.0, help="calm between two restarts; default: 1")


@dataclass(slots=True)
class RollingResult:
    """Counts and times of the requests of all clients."""

    codes: Counter[str] = field(default_factory=Counter)
    """Number of ended requests by error code; "OK" stands for success."""
    changed: int = 0
    """Number of complete answers that differ from those of a run without restarts."""
    answer_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    """Longest time without a message in each answer, in seconds."""


class ClosedLoopClients:
    """Closed-loop clients of a router, and the answers that they must receive."""

    def __init__(self, address: str, args: argparse.Namespace) -> None:
        self._address, self._count = address, args.sessions
        self._prompts = [prompt.text for prompt in load_prompts(args.prompts, args.limit)]
        self._max_tokens = args.max_tokens
        self._calm: list[tuple[int, ...]] = []
        self._over = asyncio.Event()
        self.heard = RollingResult()

    async def listen_in_calm(self) -> None:
        """Generate the answer to every prompt before the first restart, and store it as the
        expected answer."""
        bound = asyncio.Semaphore(self._count)

        async def one(client: AsyncClient, case: int) -> tuple[int, ...]:
            async with bound:
                answer = await client.generate(self._prompt(case), **self._options(case))
                return tuple(answer.token_ids)

        async with self._client() as client:
            cases = range(len(self._prompts))
            self._calm = await asyncio.gather(*(one(client, case) for case in cases))

    async def run(self) -> None:
        """Send requests with all clients until `end` is called."""
        await asyncio.gather(*map(self._session, range(self._count)))

    def end(self) -> None:
        """Let every client finish its current answer and send no further request."""
        self._over.set()

    async def _session(self, number: int) -> None:
        case = number
        async with self._client() as client:
            while not self._over.is_set():
                await self._ask(client, case % len(self._prompts))
                case += 1

    async def _ask(self, client: AsyncClient, case: int) -> None:
        heard, began = self.heard, time.monotonic()
        ids: list[int] = []
        last, pause_s = began, 0.0
        try:
            async with client.stream(self._prompt(case), **self._options(case)) as stream:
                async for delta in stream:
                    now = time.monotonic()
                    pause_s, last = max(pause_s, now - last), now
                    ids += delta.token_ids
        except OutriderError as error:
            heard.codes[error.code] += 1
            print_progress(f"FAILED: {type(error).__name__}: {error}")
            return
        heard.codes["OK"] += 1
        heard.changed += tuple(ids) != self._calm[case]
        heard.answer_s.append(time.monotonic() - began)
        heard.pause_s.append(pause_s)

    def _client(self) -> AsyncClient:
        return AsyncClient(self._address, timeout_s=ASK_S)

    def _prompt(self, case: int) -> list[ChatMessage]:
        return [user(self._prompts[case])]

    def _options(self, case: int) -> GenerateOptions:
        """Return the sampling parameters of a text; every second text is sampled."""
        sampling: GenerateOptions = {"temperature": 0.8, "seed": case} if case % 2 else {}
        return {
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            **sampling,
        }


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result. Raises InternalError if a request failed or a text
    changed."""
    config = replace(
        local_config(args, max_sessions=args.sessions, queue_limit=4 * args.sessions),
        planner="automatic",
    )
    with spare_fleet_config(config) as fleet:
        figures = asyncio.run(_measure(fleet, args))
        wait_idle(fleet)
    result = {"benchmark": "rolling", **describe(), "model": config.model_name}
    result |= {**describe_placement(config), "planner": config.planner}
    result |= {"load_1min": round(os.getloadavg()[0], 1), **figures}
    print_result(args, result)
    if figures["failed"] or figures["changed_texts"]:
        raise InternalError("requests failed, or texts changed", reason="ROLLING_RESTART")


async def _measure(fleet: LocalCluster, args: argparse.Namespace) -> dict[str, object]:
    sessions = ClosedLoopClients(fleet.address, args)
    await sessions.listen_in_calm()
    began = time.monotonic()
    asking = asyncio.create_task(sessions.run())
    try:
        restarts = await asyncio.to_thread(_restart_all, fleet, args)
    finally:
        sessions.end()
        await asking
    heard = sessions.heard
    return {
        "sessions": args.sessions,
        "max_tokens": args.max_tokens,
        "turns": args.turns,
        "seconds": round(time.monotonic() - began, 1),
        "restarts": {kind: _summary(times) for kind, times in restarts.items()},
        "requests": heard.codes.total(),
        "failed": heard.codes.total() - heard.codes["OK"],
        "codes": dict(heard.codes),
        "changed_texts": heard.changed,
        "answer_s": percentiles(heard.answer_s),
        "longest_pause_s": percentiles(heard.pause_s)
        | {"max": round(max(heard.pause_s, default=0.0), 4)},
    }


@dataclass(frozen=True, slots=True)
class ProcessRestart:
    """Duration of one restart, in seconds."""

    ending_s: float
    """Seconds from SIGTERM to the end of the process."""
    back_s: float
    """Seconds from the end of the process until the router sees all processes again."""


def _restart_all(fleet: LocalCluster, args: argparse.Namespace) -> dict[str, list[ProcessRestart]]:
    """Restart every process, one after another, `args.turns` times; return the durations by role.
    Blocks."""
    restarts: dict[str, list[ProcessRestart]] = {}
    for turn in range(args.turns):
        for role, processes in fleet.members.items():
            for process in processes:
                time.sleep(args.between_s)
                took = _restart(fleet, process)
                print_progress(f"turn {turn + 1}: {process.name} {took}")
                restarts.setdefault(role, []).append(took)
    time.sleep(args.between_s)
    return restarts


def _restart(fleet: LocalCluster, process: ChildProcess) -> ProcessRestart:
    assert process.pid is not None
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    while process.exit_status is None:
        if time.monotonic() - began > START_TIMEOUT_S:
            raise UnavailableError(f"{process.name} does not end", reason="DOES_NOT_END")
        time.sleep(0.01)
    ended = time.monotonic()
    process.start()
    process.wait_ready(START_TIMEOUT_S)
    wait_serving(fleet)
    return ProcessRestart(round(ended - began, 3), round(time.monotonic() - ended, 3))


def _summary(times: Sequence[ProcessRestart]) -> dict[str, object]:
    return {
        "count": len(times),
        "ending_s": percentiles([one.ending_s for one in times]),
        "back_s": percentiles([one.back_s for one in times]),
    }
