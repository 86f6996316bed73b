"""Load driver: runs many concurrent sessions through a verifier service and records streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from outrider.ids import SessionId
from outrider.spec.sampling import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.wire.messages import SessionEvent, SessionSpec, SpecStats
from outrider_bench.gpu.support.services import RunningService
from outrider_bench.prompts import BenchPrompt
from outrider_bench.report import percentiles


class Clock(Protocol):
    """Monotonic clock in seconds."""

    def __call__(self) -> float: ...


@dataclass(slots=True)
class SessionStreamLog:
    """Tokens of one session and the times at which its client received them."""

    opened: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Arrival time and number of tokens of each event."""
    tokens: list[int] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)

    def take(self, now: float, event: SessionEvent) -> None:
        """Record an event."""
        self.arrivals.append((now, len(event.tokens)))
        self.tokens += event.tokens
        self.stats = event.stats


@dataclass(slots=True)
class ServiceWave:
    """Results of the sessions of one wave, of which `concurrency` run at a time."""

    streams: list[SessionStreamLog]
    concurrency: int

    @property
    def steady(self) -> tuple[float, float]:
        """Start and end of the steady state, in which `concurrency` sessions decode.

        It ends when the last session is opened or, if all sessions are opened at the start, when
        the first one ends.
        """
        first = sorted(stream.arrivals[0][0] for stream in self.streams)
        start = first[self.concurrency - 1]
        if self.concurrency < len(self.streams):
            return start, max(stream.opened for stream in self.streams)
        return start, min(stream.arrivals[-1][0] for stream in self.streams)

    @property
    def round_ms(self) -> float:
        """Median milliseconds between two successive events of a session in the steady state; NaN
        if there are none."""
        start, end = self.steady
        gaps = [gap for gap, _ in self._gaps(start, end)]
        return median(gaps) * 1000.0 if gaps else float("nan")

    @property
    def steady_tokens_per_s(self) -> float:
        """Tokens per second of all sessions in the steady state; NaN if there is none."""
        start, end = self.steady
        tokens = sum(n for s in self.streams for at, n in s.arrivals if start < at <= end)
        return tokens / (end - start) if end > start else float("nan")

    @property
    def mean_emitted(self) -> float:
        """Mean number of tokens that a session emits per round; NaN without rounds. The token that
        prefill emits does not count."""
        rounds = sum(stream.stats.rounds for stream in self.streams)
        emitted = sum(stream.stats.emitted for stream in self.streams)
        return emitted / rounds if rounds else float("nan")

    @property
    def first_ms(self) -> list[float]:
        """Milliseconds from the opening of each session to its first token."""
        return [(stream.arrivals[0][0] - stream.opened) * 1000.0 for stream in self.streams]

    def summary(self) -> dict[str, object]:
        """Return the figures of a serving benchmark by name: throughput, rounds and latencies.
        Times whose names end in `_ms` are in milliseconds, others in seconds."""
        between = [gap * 1000.0 for gap, _ in self._gaps(0.0, float("inf"))]
        each = [
            (s.arrivals[-1][0] - s.arrivals[0][0]) * 1000.0 / max(1, len(s.tokens) - 1)
            for s in self.streams
        ]
        seconds = max(s.arrivals[-1][0] for s in self.streams) - min(s.opened for s in self.streams)
        total = sum(len(s.tokens) for s in self.streams)
        fallback = sum(s.stats.fallback_rounds for s in self.streams)
        return {
            "sessions": len(self.streams),
            "concurrency": self.concurrency,
            "tokens": total,
            "seconds": round(seconds, 4),
            "tokens_per_s": round(total / seconds, 2),
            "requests_per_s": round(len(self.streams) / seconds, 4),
            "steady_tokens_per_s": round(self.steady_tokens_per_s, 2),
            "round_ms": round(self.round_ms, 4),
            "emitted_per_round": round(self.mean_emitted, 4),
            "fallback_rounds": fallback,
            "ttft_ms": percentiles(self.first_ms),
            "itl_ms": percentiles(between),
            "per_token_ms": percentiles(each),
        }

    def _gaps(self, start: float, end: float) -> list[tuple[float, int]]:
        """Return the seconds between consecutive events of a session within a time window, and the
        tokens of the later event."""
        return [
            (later - earlier, count)
            for stream in self.streams
            for (earlier, _), (later, count) in zip(
                stream.arrivals, stream.arrivals[1:], strict=False
            )
            if earlier >= start and later <= end
        ]


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `length` random token ids. Ids below 8 are not used, because they
    are often special tokens."""
    generator = np.random.default_rng(seed)
    low = min(8, vocab_size - 1)
    return generator.integers(low, vocab_size, size=(count, length)).tolist()  # type: ignore[no-any-return]


def chat_prompts(model: Path, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """Return the token ids of prompts in the chat template of the model in the directory
    `model`."""
    tokenizer = Tokenizer.load(model)
    return [
        list(tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
        for prompt in prompts
    ]


async def drive_sessions(
    running: RunningService,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: SamplingParams | None = None,
    stop_ids: tuple[int, ...] = (),
    concurrency: int | None = None,
    tag: str = "s",
    clock: Clock = time.perf_counter,
) -> ServiceWave:
    """Open one session per prompt and read all of them to their ends.

    At most `concurrency` sessions run at a time; with None all run at the same time. Session i
    samples with the seed of `sampling` plus i.
    """
    setup, base = running.setup, sampling or SamplingParams()
    limit = min(concurrency or len(prompts), len(prompts))
    gate = asyncio.Semaphore(limit)

    async def one(index: int) -> SessionStreamLog:
        spec = SessionSpec(
            session_id=SessionId(f"{tag}-{index}"),
            epoch=0,
            token_ids=tuple(prompts[index]),
            prompt_len=len(prompts[index]),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_ids,
            sampling=replace(base, seed=base.seed + index),
            plan=setup.plan,
            drafter_id=setup.drafter_id,
        )
        async with gate:
            stream = SessionStreamLog(clock())
            async for event in running.service.open_session(spec):
                stream.take(clock(), event)
        return stream

    streams = await asyncio.gather(*(one(index) for index in range(len(prompts))))
    return ServiceWave(list(streams), limit)
