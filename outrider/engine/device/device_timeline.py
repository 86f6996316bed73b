# mypy: disable-error-code="no-untyped-call"
"""Times of device work by CUDA events, for timelines and for idle times between forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """One named span of device work. Its times are in milliseconds since the first span of the
    `DeviceRecorder` began."""

    name: str
    start_ms: float
    end_ms: float


class DeviceRecorder:
    """Records the start and end of device work with CUDA events. Does nothing if it is disabled or
    if the device is a CPU."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: torch.cuda.Event | None = None

    def record_span(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager. Work that is launched inside it on the current stream is
        recorded as one span."""
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
        """Wait for the device, then return the spans recorded since the last call, oldest first."""
        if self._origin is None:
            return []
        torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [
            DeviceSpan(name, self._origin.elapsed_time(start), self._origin.elapsed_time(end))
            for name, start, end in marks
        ]
