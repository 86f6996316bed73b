"""DeviceClock: the host's time of what a device has stamped, for timelines.

The device is asked for its time, and the host looks at its own clock before and after. Half of the
time between the two is the most by which the offset can be wrong. Clocks drift apart afterwards, so
the offset is measured again with each exchange that opens.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from outrider.engine.kernels.exchange.clock import write_clock

logger = logging.getLogger(__name__)
_TRIES: Final = 16
"""The offset is that of the shortest of so many readings."""


class DeviceClock:
    """Converts stamps of a device into the time that `outrider.timeline` has."""

    def __init__(self, device: torch.device) -> None:
        """Measure the offset for the first time, which may compile a kernel."""
        is_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._moment = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
            self._address = torch.tensor(
                [self._moment.data_ptr()], dtype=torch.int64, device=device
            )
        self._stream: torch.cuda.Stream | None = None
        if is_cuda:
            # What other streams wait for must not keep the answer.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._offset_ns = 0
        self.error_s = 0.0
        """Most that the offset could be wrong by when it was measured."""
        self._read()
        self.measure()

    def measure(self) -> None:
        """Measure the offset; takes about a millisecond."""
        error_ns, self._offset_ns = min(self._compare() for _ in range(_TRIES))
        self.error_s = error_ns * 1e-9
        logger.info("device clock measured", extra={"error_us": round(error_ns * 1e-3, 1)})

    def host_time(self, stamp_ns: int) -> float:
        """Seconds of `time.perf_counter` at the moment of a stamp."""
        return (stamp_ns + self._offset_ns) * 1e-9

    def _compare(self) -> tuple[int, int]:
        """By how much an offset may be wrong, and the offset, in nanoseconds."""
        before = time.perf_counter_ns()
        moment = self._read()
        after = time.perf_counter_ns()
        return (after - before + 1) // 2, (before + after) // 2 - moment

    def _read(self) -> int:
        with torch.cuda.stream(self._stream):
            write_clock(self._moment, self._address)
        if self._stream is not None:
            self._stream.synchronize()
        return int(self._moment[0])
