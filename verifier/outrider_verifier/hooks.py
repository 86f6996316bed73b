"""Hook points of a verifier process, for the modules that its setting `hooks` lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.device.graphs.shapes import RoundShape


class RoundThrottle(Protocol):
    """Makes rounds last longer than their computation. The thread that runs the rounds calls its
    methods; which of them it calls depends on the model runner."""

    def delay_forward(self, num_tokens: int, began: float) -> None:
        """Wait on the host, to make the round last longer. The CPU runner calls this after the
        forward pass of each round. `num_tokens` is the number of token rows in the batch, and
        `began` the time at which the pass began, on the clock of `time.perf_counter`."""
        ...

    def calibrate(self, measured: Mapping[RoundShape, float]) -> Mapping[RoundShape, float]:
        """Take the measured time of a round of each shape, in seconds, and return the times that
        these rounds will take with the throttle. The GPU runner calls this once, after it has
        captured and timed all shapes. Without CUDA graphs the GPU runner calls neither this method
        nor `delay_launch`."""
        ...

    def delay_launch(self, shape: RoundShape) -> None:
        """Make the current stream of the device wait, so that the round lasts longer. The GPU
        runner calls this after each launch of a round. The method itself must not wait for the
        device."""
        ...


@dataclass(slots=True, kw_only=True)
class VerifierHooks:
    """Hook points of a verifier that hooks may set. A hook point that is not set changes
    nothing."""

    round_throttle: RoundThrottle | None = None
    """Makes rounds last longer; None for no delay."""
