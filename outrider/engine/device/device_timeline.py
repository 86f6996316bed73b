# mypy: disable-error-code="no-untyped-call"
"""CUDA-event timings of launched work, for timelines and idle time between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """One span of device work, in milliseconds since the recorder's origin."""

    name: str
    start_ms: float
    end_ms: float


class DeviceRecorder:
    """Marks the start and end of device work with CUDA events; costs nothing when disabled."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: torch.cuda.Event | None = None

    def record_span(self, name: str) -> AbstractContextManager[None]:
        """Record the work launched inside this context on the current stream."""
        return self._span(name) if self.enabled else _NOTHING

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        if self._origin is None:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._marks.append((name, start, end))

    def take_spans(self) -> list[DeviceSpan]:
        """Return all spans recorded so far, oldest first, after waiting for the device."""
        if self._origin is None:
            return []
        torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [
            DeviceSpan(name, self._origin.elapsed_time(start), self._origin.elapsed_time(end))
            for name, start, end in marks
        ]
