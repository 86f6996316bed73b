# mypy: disable-error-code="no-untyped-call"
"""Benchmark only: delays each GPU round to the duration of a larger model's round.

After each round one multiprocessor of the device spins for the remaining time. Two processes on one
device therefore interfere as little as on two devices, which is not true of a real large model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from outrider.engine.device.graphs.shapes import RoundShape

_TRIAL_CYCLES: Final = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDuration:
    """Round duration of the larger model, by the rows of its forward."""

    round_s: float
    """Of one row."""
    row_s: float
    """Of each further row."""

    @classmethod
    def from_settings(cls, *, round_ms: float, row_us: float) -> TargetDuration | None:
        """None where no duration is asked for."""
        return cls(round_s=round_ms / 1e3, row_s=row_us / 1e6) if round_ms else None

    def seconds(self, rows: int) -> float:
        """Of a round of so many rows."""
        return self.round_s + self.row_s * (rows - 1)


class RoundDelay:
    """Waits on the device behind rounds of known duration."""

    def __init__(self, model: TargetDuration, times: Mapping[RoundShape, float]) -> None:
        """`times`: seconds of each shape as it is; others are not held back."""
        self.times = {
            shape: max(took, model.seconds(shape.token_rows)) for shape, took in times.items()
        }
        """Seconds of each shape as it will be."""
        rate = _cycles_per_s()
        self._cycles = {
            shape: int(rate * (self.times[shape] - took)) for shape, took in times.items()
        }

    def delay_round(self, shape: RoundShape) -> None:
        """Wait for what a round of this shape, just launched, is to take longer."""
        cycles = self._cycles.get(shape, 0)
        if cycles > 0:
            torch.cuda._sleep(cycles)


def _cycles_per_s() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_TRIAL_CYCLES)
    start.record()
    torch.cuda._sleep(_TRIAL_CYCLES)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return _TRIAL_CYCLES / milliseconds * 1000.0
