"""Timeline files in Trace Event Format, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrackSpan:
    """One bar of a timeline. Times are in milliseconds, on one clock for all tracks."""

    track: str
    name: str
    start_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        """Length of the span in milliseconds."""
        return self.end_ms - self.start_ms


def trace_events(spans: Iterable[TrackSpan], tracks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the spans as complete events (`ph` is "X") with times in microseconds. Each track is a
    thread, and threads are sorted in the order of `tracks`."""
    numbers = {track: index for index, track in enumerate(tracks)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "outrider"}}
    ]
    for track, number in numbers.items():
        name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": track}}
        order = {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number}
        events += [name, {**order, "args": {"sort_index": number}}]
    for span in sorted(spans, key=lambda span: span.start_ms):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.track,
                "pid": 1,
                "tid": numbers[span.track],
                "ts": round(span.start_ms * 1000.0, 3),
                "dur": round(span.ms * 1000.0, 3),
            }
        )
    return events


def write_trace(
    path: Path, spans: Iterable[TrackSpan], tracks: Sequence[str], **about: object
) -> None:
    """Write a trace file; `about` becomes its metadata."""
    content = {
        "traceEvents": trace_events(spans, tracks),
        "displayTimeUnit": "ms",
        "otherData": about,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
