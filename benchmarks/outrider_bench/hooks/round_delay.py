# mypy: disable-error-code="no-untyped-call"
"""Hook of a verifier that makes its rounds last as long as those of a larger model.

    --hook outrider_bench.hooks.round_delay:round_ms=30,row_us=500

A round of one token row lasts `round_ms`, and each further token row adds `row_us`. A round that
lasts longer anyway is not delayed. On a CPU the thread that runs the rounds sleeps for the rest of
the time. On a GPU a kernel that waits on one multiprocessor runs after each round for the rest of
the time. It leaves most of the device to other processes, so that two processes on one device
disturb each other as little as on two devices. With a real large model they would disturb each
other more. A GPU verifier that runs without CUDA graphs delays no round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from outrider_verifier.hooks import VerifierHooks

from outrider.engine.device.graphs.shapes import RoundShape
from outrider.errors import InvalidRequestError

_TRIAL_CYCLES: Final = 20_000_000


def install(hooks: VerifierHooks, *, round_ms: float, row_us: float = 0.0) -> None:
    """Make rounds of one token row last `round_ms`, and `row_us` more for each further token row.
    Raises InvalidRequestError for times that are out of range."""
    if round_ms <= 0.0 or row_us < 0.0:
        raise InvalidRequestError(
            f"round_ms must be positive and row_us not negative, got {round_ms:g} and {row_us:g}",
            reason="INVALID_DURATION",
        )
    hooks.round_throttle = RoundDelay(TargetDuration(round_s=round_ms / 1e3, row_s=row_us / 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDuration:
    """Duration of a round of the larger model, computed from the number of token rows in its
    forward pass."""

    round_s: float
    """Seconds of a round of one token row."""
    row_s: float
    """Seconds of each further token row."""

    def seconds(self, num_tokens: int) -> float:
        """Return the duration of a round of `num_tokens` token rows."""
        return self.round_s + self.row_s * (num_tokens - 1)


class RoundDelay:
    """A `RoundThrottle` that waits after each round until the duration of the larger model has
    passed."""

    def __init__(self, model: TargetDuration) -> None:
        self._model = model
        self._cycles: dict[RoundShape, int] = {}
        """Number of clock cycles that the device waits after a round, by the shape of the round.
        Rounds of other shapes are not delayed."""

    def delay_forward(self, num_tokens: int, began: float) -> None:
        """Sleep until a round of `num_tokens` token rows that began at `began` has lasted long
        enough. The clock is `time.perf_counter`."""
        due = began + self._model.seconds(num_tokens)
        time.sleep(max(0.0, due - time.perf_counter()))

    def calibrate(self, measured: Mapping[RoundShape, float]) -> Mapping[RoundShape, float]:
        """Compute how long the device must wait after a round of each shape in `measured`, which
        contains their durations in seconds. Return the durations with this wait, by shape."""
        slowed = {
            shape: max(took, self._model.seconds(shape.token_rows))
            for shape, took in measured.items()
        }
        rate = _cycles_per_s()
        self._cycles = {
            shape: int(rate * (slowed[shape] - took)) for shape, took in measured.items()
        }
        return slowed

    def delay_launch(self, shape: RoundShape) -> None:
        """Launch the kernel that waits after the round of this shape, which was launched just
        before."""
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
