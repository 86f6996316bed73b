"""Requests of a wave, and their arrival times in an open loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from outrider_bench.prompts import BenchPrompt
from outrider_bench.serve.cells import SEED, BenchCell

REQUESTS: Final = 4
"""Requests of a closed wave, in multiples of those at a time."""
MIN_REQUESTS: Final = 16
OPEN_SECONDS: Final = 20.0
"""Mean length of an open wave's arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a wave."""

    text: str
    """Of the user's message."""
    options: dict[str, Any] = field(default_factory=dict)
    after_s: float = 0.0
    """When it arrives in an open loop, from the start of the wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSize:
    """Number of requests of a wave."""

    per_session: int = REQUESTS
    min_requests: int = MIN_REQUESTS

    def requests(self, cell: BenchCell) -> int:
        """Of one wave of this cell."""
        if cell.rate is not None:
            return max(self.min_requests, round(cell.rate * OPEN_SECONDS))
        assert cell.sessions is not None
        return max(self.min_requests, self.per_session * cell.sessions)


def make_load(
    cell: BenchCell, prompts: Sequence[BenchPrompt], size: WaveSize
) -> list[BenchRequest]:
    """Return the requests of every wave of a cell: the same prompts and seeds each time, so that
    waves differ by what the services have learnt, not by what they are asked."""
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
    """Return the seconds at which so many requests of a Poisson process arrive, ascending; the
    first at 0."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
    gaps[0] = 0.0
    return [float(at) for at in np.cumsum(gaps)]


def split_sessions(sessions: int, processes: int) -> list[int]:
    """Sessions of each client process: as even as can be, none for those past the sessions."""
    return [sessions // processes + (i < sessions % processes) for i in range(processes)]
