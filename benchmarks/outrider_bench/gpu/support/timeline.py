"""Timeline of a run of rounds: host spans, device spans, and the gaps between them.

Device spans come from CUDA events (`outrider.engine.device.device_timeline`), host spans from
methods that a `HostTimeline` wraps. With the right `offset_ms`, `device_spans` puts device spans on
the host's clock. Without a CUDA device there are only host spans.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from outrider_bench.gpu.support.trace import TrackSpan

HOST, VERIFY, DRAFT, TRANSFER = "host", "GPU verify", "GPU draft", "transfers"
TRACKS = (HOST, VERIFY, DRAFT, TRANSFER)
DEVICE_TRACKS = {"verify": VERIFY, "round": VERIFY, "draft": DRAFT, "transfer": TRANSFER}
"""Track of a device span, by the name of the span. A fused round, which also drafts, is on the
verify track."""


class HostTimeline:
    """Records calls of methods on the host as spans."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._origin = clock()
        self.spans: list[TrackSpan] = []

    @property
    def now_ms(self) -> float:
        """Milliseconds since this timeline began."""
        return (self._clock() - self._origin) * 1000.0

    def wrap(self, owner: Any, method: str, name: str, track: str = HOST) -> bool:
        """Replace `owner.method` by a wrapper that records every call as a span called `name` on
        `track`. Return False if there is no such method."""
        original = getattr(owner, method, None)
        if original is None:
            return False

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now_ms
            try:
                return original(*args, **kwargs)
            finally:
                self.spans.append(TrackSpan(track, name, start, self.now_ms))

        setattr(owner, method, timed)
        return True


def device_spans(spans: Sequence[Any], offset_ms: float = 0.0) -> list[TrackSpan]:
    """Convert the spans of a `DeviceRecorder` to spans on the tracks in DEVICE_TRACKS. `offset_ms`
    is added to their times. Spans with other names are left out."""
    return [
        TrackSpan(
            DEVICE_TRACKS[span.name], span.name, span.start_ms + offset_ms, span.end_ms + offset_ms
        )
        for span in spans
        if span.name in DEVICE_TRACKS
    ]


def idle_gaps_us(spans: Sequence[TrackSpan]) -> list[float]:
    """Return the microseconds between the end of each verify forward and the start of the next one.

    Only the time in which the device drafted in the meantime is subtracted. A fused round drafts
    within its own span, so all of the gap after it is idle.
    """
    forwards = sorted((s for s in spans if s.track == VERIFY), key=lambda s: s.start_ms)
    drafts = [s for s in spans if s.track == DRAFT]
    gaps = []
    for before, after in itertools.pairwise(forwards):
        start, end = before.end_ms, after.start_ms
        drafting = sum(_overlap(draft, start, end) for draft in drafts)
        gaps.append(max(0.0, end - start - drafting) * 1000.0)
    return gaps


def round_overhead_us(spans: Sequence[TrackSpan]) -> float | None:
    """Return the median of `idle_gaps_us`; None with fewer than two forwards."""
    gaps = idle_gaps_us(spans)
    return median(gaps) if gaps else None


def split_ms(spans: Sequence[TrackSpan]) -> dict[str, float]:
    """Return the median milliseconds of the spans of each name, by "track: name"."""
    by_name: dict[str, list[float]] = {}
    for span in spans:
        by_name.setdefault(f"{span.track}: {span.name}", []).append(span.ms)
    return {name: round(median(values), 4) for name, values in by_name.items()}


def select_rounds(spans: Sequence[TrackSpan], rounds: int, skip: int = 0) -> list[TrackSpan]:
    """Return the spans of `rounds` rounds after the first `skip`. A round begins with its verify
    forward or, without a device, with the call that submits it."""
    starts = sorted(s.start_ms for s in spans if s.track == VERIFY) or sorted(
        s.start_ms for s in spans if s.name == "submit"
    )
    if len(starts) < 2:
        return list(spans)
    skip = min(skip, len(starts) - 2)
    last = min(skip + rounds, len(starts) - 1)
    return [s for s in spans if s.end_ms > starts[skip] and s.start_ms < starts[last]]


def _overlap(span: TrackSpan, start: float, end: float) -> float:
    return max(0.0, min(span.end_ms, end) - max(span.start_ms, start))
