"""Client processes that send requests and read answers, enough of them not to be the bottleneck."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Final, Self

from outrider.client import AsyncClient, OutriderError, RetryPolicy, user
from outrider.errors import InternalError
from outrider.process_tuning import run_event_loop, tune_process
from outrider_bench.prompts import is_loop
from outrider_bench.serve.wave_metrics import RequestWave, WaveAnswer
from outrider_bench.serve.workload import BenchRequest, split_sessions

MAX_PROCESSES: Final = 8
SERVING_CORES: Final = 4
"""Number of CPU cores left to verifier, drafter and router, if the machine has enough."""
HEAD_START_S: Final = 0.05
"""Seconds between the moment when all clients are ready and the first request, so that all clients
start at the same time."""
TIMEOUT_S: Final = 300.0
"""Timeout of one request, in seconds."""

_clock = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCommand:
    """Command to a client process to send its part of the requests of a wave."""

    address: str
    asks: Sequence[BenchRequest]
    sessions: int | None
    """Number of concurrent requests of this process. With None the process sends each request when
    it is due: those whose index modulo `processes` equals `index`."""
    index: int
    processes: int


@dataclass(frozen=True, slots=True)
class WaveReport:
    """Answers that one client process received in a wave, and the share of a core that it used."""

    answers: list[WaveAnswer]
    cpu_share: float


def default_processes() -> int:
    """Return the default number of client processes: one per core beyond SERVING_CORES, at least 1
    and at most MAX_PROCESSES."""
    return min(MAX_PROCESSES, max(1, len(os.sched_getaffinity(0)) - SERVING_CORES))


class ClientProcesses:
    """Client processes that are started once and then send the requests of any number of waves. Use
    it as a context manager."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        context = multiprocessing.get_context("spawn")
        self._tickets = context.Value("q", 0)
        self._pipes: list[Connection] = []
        self._children: list[BaseProcess] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, self._tickets), daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    @property
    def count(self) -> int:
        """Number of client processes."""
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(1.0)
            if child.is_alive():
                child.terminate()

    def wave(self, address: str, asks: Sequence[BenchRequest], sessions: int | None) -> RequestWave:
        """Send the requests `asks` to the router at `address` and read all answers.

        `sessions` is the number of concurrent requests. With None each request is sent when it is
        due. Raises InternalError if a client process fails.
        """
        each: list[int | None] = [None] * self._count
        if sessions is not None:
            each = list(split_sessions(sessions, self._count))
        with self._tickets.get_lock():
            self._tickets.value = 0
        try:
            for index, (pipe, share) in enumerate(zip(self._pipes, each, strict=True)):
                pipe.send(
                    WaveCommand(
                        address=address,
                        asks=asks,
                        sessions=share,
                        index=index,
                        processes=self._count,
                    )
                )
            for pipe in self._pipes:
                _expect(pipe, str)
            begin = _clock() + HEAD_START_S
            for pipe in self._pipes:
                pipe.send(begin)
            heard = [_expect(pipe, WaveReport) for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise InternalError(f"a client process died: {error!r}", reason="CLIENT") from error
        answers = tuple(answer for part in heard for answer in part.answers)
        return RequestWave(answers, sessions, max(part.cpu_share for part in heard))


def _expect(pipe: Connection, kind: type[Any]) -> Any:
    """Return the next message of a client process, which must be of type `kind`. A client process
    that fails sends its error message as bytes; InternalError is raised with it."""
    message = pipe.recv()
    if not isinstance(message, kind):
        text = message.decode() if isinstance(message, bytes) else repr(message)
        raise InternalError(f"a client process failed: {text}", reason="CLIENT")
    return message


def _serve(pipe: Connection, tickets: Any) -> None:
    """Run a client process: receive commands and send answers until the pipe is closed."""
    tune_process()

    def take() -> int:
        with tickets.get_lock():
            tickets.value += 1
            return int(tickets.value) - 1

    run_event_loop(_orders(pipe, take))


async def _orders(pipe: Connection, take: Callable[[], int]) -> None:
    while True:
        try:
            order = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            return
        try:
            heard: WaveReport | bytes = await _wave(pipe, order, take)
        except OutriderError as error:
            heard = error.message.encode()
        pipe.send(heard)


async def _wave(pipe: Connection, order: WaveCommand, take: Callable[[], int]) -> WaveReport:
    async with _connected(order.address) as client:
        pipe.send("ready")
        begin = await asyncio.to_thread(pipe.recv)
        await _until(begin)
        used = time.process_time()
        if order.sessions is None:
            mine = order.asks[order.index :: order.processes]
            jobs = [_ask(client, ask, begin + ask.after_s) for ask in mine]
            answers = list(await asyncio.gather(*jobs))
        else:
            loops = [_loop(client, order.asks, take, begin) for _ in range(order.sessions)]
            answers = [answer for part in await asyncio.gather(*loops) for answer in part]
        used = time.process_time() - used
        return WaveReport(answers, used / max(_clock() - begin, 1e-9))


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[AsyncClient]:
    """Yield a connected client, so that no time to first token includes the connection setup."""
    once = RetryPolicy(max_attempts=1)
    async with AsyncClient(address, timeout_s=TIMEOUT_S, retry=once) as client:
        await client.server_info()
        yield client


async def _loop(
    client: AsyncClient, asks: Sequence[BenchRequest], take: Callable[[], int], begin: float
) -> list[WaveAnswer]:
    """Send one request after another until none of the wave's requests is left, and return their
    answers."""
    answers: list[WaveAnswer] = []
    while (index := take()) < len(asks):
        answers.append(await _ask(client, asks[index], _clock() if answers else begin))
    return answers


async def _ask(client: AsyncClient, ask: BenchRequest, due: float) -> WaveAnswer:
    await _until(due)
    opened = _clock()
    arrivals: list[tuple[float, int]] = []
    tokens: list[int] = []
    try:
        async with client.stream([user(ask.text)], **ask.options) as stream:
            async for delta in stream:
                if delta.token_ids:
                    arrivals.append((_clock(), len(delta.token_ids)))
                    tokens += delta.token_ids
    except OutriderError as error:
        return WaveAnswer(due=due, opened=opened, arrivals=tuple(arrivals), code=error.code)
    if stream.finish is None:
        return WaveAnswer(due=due, opened=opened, arrivals=tuple(arrivals), code="NO_FINISH")
    stats = stream.finish.stats
    return WaveAnswer(
        due=due,
        opened=opened,
        arrivals=tuple(arrivals),
        rounds=stats.rounds,
        emitted=stats.emitted,
        proposed=stats.proposed,
        accepted=stats.accepted,
        fallback_rounds=stats.fallback_rounds,
        look_ahead_rounds=stats.look_ahead_rounds,
        hit_rounds=stats.hit_rounds,
        hit_accepted=stats.hit_accepted,
        fresh_rounds=stats.fresh_rounds,
        fresh_accepted=stats.fresh_accepted,
        loops=is_loop(tokens),
    )


async def _until(at: float) -> None:
    delay_s = at - _clock()
    if delay_s > 0.0:
        await asyncio.sleep(delay_s)
