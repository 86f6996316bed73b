"""Hook points of a verifier process, for the modules that its setting `hooks` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.device.graphs.shapes import RoundShape


class RoundThrottle(Protocol):
    """Makes rounds last longer than their computation. The thread that runs the rounds calls it;
    which of the methods it calls depends on the model runner."""

    def delay_forward(self, num_tokens: int, began: float) -> None:
        """Wait on the host. The CPU runner calls this behind the forward of a round, with the token
        rows of its batch; `began` is on the clock of `time.perf_counter`."""
        ...

    def calibrate(self, measured: Mapping[RoundShape, float]) -> Mapping[RoundShape, float]:
        """Take what the rounds of each shape last, in seconds, and return what they will last. The
        GPU runner calls this once, after it has captured and timed all shapes; where it runs
        without CUDA graphs it calls neither this nor `delay_launch`."""
        ...

    def delay_launch(self, shape: RoundShape) -> None:
        """Make the device wait, on its current stream. The GPU runner calls this behind each launch
        of a round; it must not wait for the device."""
        ...


@dataclass(slots=True, kw_only=True)
class VerifierHooks:
    """What a hook of a verifier may set; a point that nobody sets changes nothing."""

    round_throttle: RoundThrottle | None = None
    """What makes rounds last longer."""
