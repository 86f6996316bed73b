"""Requests of a wave, and their arrival times in an open loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from outrider_bench.prompts import BenchPrompt
from outrider_bench.serve.cells import SEED, BenchCell

REQUESTS: Final = 4
"""Number of requests per concurrent session in a closed-loop wave."""
MIN_REQUESTS: Final = 16
OPEN_SECONDS: Final = 20.0
"""Mean seconds from the first to the last arrival in an open-loop wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """Text and options of one request of a wave."""

    text: str
    """Text of the user's message."""
    options: dict[str, Any] = field(default_factory=dict)
    after_s: float = 0.0
    """Arrival time in an open loop, in seconds after the start of the wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSize:
    """Number of requests of a wave: `per_session` for each concurrent session, at least
    `min_requests`."""

    per_session: int = REQUESTS
    min_requests: int = MIN_REQUESTS

    def requests(self, cell: BenchCell) -> int:
        """Return the number of requests in each wave of a cell."""
        if cell.rate is not None:
            return max(self.min_requests, round(cell.rate * OPEN_SECONDS))
        assert cell.sessions is not None
        return max(self.min_requests, self.per_session * cell.sessions)


def make_load(
    cell: BenchCell, prompts: Sequence[BenchPrompt], size: WaveSize
) -> list[BenchRequest]:
    """Return the requests of each wave of a cell.

    Prompts and seeds are the same in every wave, so that waves differ only in the state of the
    services.
    """
    count = size.requests(cell)
    shared: dict[str, Any] = {
        **cell.drafts.options(),
        **cell.sampling.options(),
        "max_tokens": cell.max_tokens,
    }
    times = [0.0] * count if cell.rate is None else arrivals(count, cell.rate)
    return [
        BenchRequest(
            text=prompts[index % len(prompts)].text,
            options={**shared, "seed": SEED + index},
            after_s=times[index],
        )
        for index in range(count)
    ]


def arrivals(count: int, rate: float, seed: int = SEED) -> list[float]:
    """Return the arrival times of `count` requests in seconds, in ascending order. They are a
    Poisson process with `rate` requests per second; the first request arrives at time 0."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
    gaps[0] = 0.0
    return [float(at) for at in np.cumsum(gaps)]


def split_sessions(sessions: int, processes: int) -> list[int]:
    """Return the number of sessions of each client process. The numbers differ by at most one."""
    return [sessions // processes + (i < sessions % processes) for i in range(processes)]
