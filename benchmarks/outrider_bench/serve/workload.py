"""Requests of a wave, and their arrival times in an open loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from outrider_bench.prompts import BenchPrompt
from outrider_bench.serve.cells import SEED, BenchCell

REQUESTS: Final = 4
"""Number of requests of a closed-loop wave per concurrent session."""
MIN_REQUESTS: Final = 16
OPEN_SECONDS: Final = 20.0
"""Mean number of seconds in which the requests of an open-loop wave arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a wave."""

    text: str
    """Text of the user's message."""
    options: dict[str, Any] = field(default_factory=dict)
    after_s: float = 0.0
    """Arrival time in an open loop, in seconds from the start of the wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSize:
    """Number of requests of a wave."""

    per_session: int = REQUESTS
    min_requests: int = MIN_REQUESTS

    def requests(self, cell: BenchCell) -> int:
        """Return the number of requests in one wave of a cell."""
        if cell.rate is not None:
            return max(self.min_requests, round(cell.rate * OPEN_SECONDS))
        assert cell.sessions is not None
        return max(self.min_requests, self.per_session * cell.sessions)


def make_load(
    cell: BenchCell, prompts: Sequence[BenchPrompt], size: WaveSize
) -> list[BenchRequest]:
    """Return the requests of a wave of a cell.

    Prompts and seeds are the same in every wave, so that waves differ only by the state of the
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
    """Return the ascending arrival times of `count` requests of a Poisson process of `rate` per
    second, in seconds. The first is 0."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
    gaps[0] = 0.0
    return [float(at) for at in np.cumsum(gaps)]


def split_sessions(sessions: int, processes: int) -> list[int]:
    """Return the number of sessions of each client process, as even as possible."""
    return [sessions // processes + (i < sessions % processes) for i in range(processes)]
