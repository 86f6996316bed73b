"""Measures the stages of a process's start, and logs their durations when the process is ready."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_STAT: Final = Path("/proc/self/stat")
_START_TIME_FIELD: Final = 19
"""Index of the process's start time, in clock ticks, among the fields of /proc/self/stat after the
process name."""


class StartStage(StrEnum):
    """Stages of a process's start. Weights may load while kernels compile, so the durations may add
    up to more than the total."""

    IMPORTS = "imports"
    """From the start of the process until its modules are imported."""
    WEIGHTS = "weights"
    """Allocation and reading of the weights of all models."""
    KERNELS = "kernels"
    """Compilation of kernels before CUDA graphs are captured."""
    WEIGHTS_WAIT = "weights_wait"
    """Wait for weights after the kernels were compiled."""
    CAPTURE = "capture"
    """Capture of CUDA graphs and timing of rounds."""


class StartTimes:
    """Durations of the stages of this process's start, in seconds."""

    def __init__(self) -> None:
        """Record the time since the process began as the stage IMPORTS. The object must therefore
        be created after the imports and before the process builds its service."""
        self._began = _process_start()
        self._seconds = {StartStage.IMPORTS: time.monotonic() - self._began}

    @contextmanager
    def measure(self, stage: StartStage) -> Iterator[None]:
        """Add the duration of the context to the time of a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(stage, time.monotonic() - began)

    def add(self, stage: StartStage, seconds: float) -> None:
        """Add seconds to the time of a stage."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def log(self) -> None:
        """Log the event "start-up finished" with the seconds of each stage, and with `total`, the
        seconds since the process began."""
        seconds = {str(stage): round(took, 2) for stage, took in self._seconds.items()}
        seconds["total"] = round(time.monotonic() - self._began, 2)
        logger.info("start-up finished", extra={"seconds": seconds})


def _process_start() -> float:
    """Return when this process began, by `time.monotonic`, or the current time if it is unknown."""
    now = time.monotonic()
    try:
        ticks = int(_STAT.read_text("utf-8").rpartition(")")[2].split()[_START_TIME_FIELD])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age_s, 0.0)
