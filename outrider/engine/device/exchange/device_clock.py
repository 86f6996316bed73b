"""DeviceClock: converts time stamps of a device to the host's clock, for timelines.

The offset between the clocks is measured: the host reads its own clock, then the device's, then its
own again. The offset can be wrong by at most half of the time between the two host readings. The
clocks drift apart afterwards, so the offset is measured again whenever an exchange opens.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from outrider.engine.kernels.exchange.clock import write_clock

logger = logging.getLogger(__name__)
_TRIES: Final = 16
"""Number of readings; the offset is taken from the shortest one."""


class DeviceClock:
    """Converts time stamps of a device to the clock of `outrider.timeline`."""

    def __init__(self, device: torch.device) -> None:
        """Measure the offset between the clocks. The first measurement may compile a kernel."""
        is_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._moment = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
            self._address = torch.tensor(
                [self._moment.data_ptr()], dtype=torch.int64, device=device
            )
        self._stream: torch.cuda.Stream | None = None
        if is_cuda:
            # A stream of its own, so that waits in other streams do not delay the reading.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._offset_ns = 0
        self.error_s = 0.0
        """Upper bound of the error of the measured offset, in seconds. It does not include drift
        after the measurement."""
        self._read()
        self.measure()

    def measure(self) -> None:
        """Measure the offset between the clocks again. This takes about a millisecond."""
        error_ns, self._offset_ns = min(self._compare() for _ in range(_TRIES))
        self.error_s = error_ns * 1e-9
        logger.info("device clock measured", extra={"error_us": round(error_ns * 1e-3, 1)})

    def host_time(self, stamp_ns: int) -> float:
        """Convert a device time stamp in nanoseconds to the host's time, in seconds of
        `time.perf_counter`."""
        return (stamp_ns + self._offset_ns) * 1e-9

    def _compare(self) -> tuple[int, int]:
        """Return the error bound and the offset of one reading, in nanoseconds."""
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
