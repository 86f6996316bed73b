"""Timeline recorder: the work of each thread of this process, in Trace Event Format (Perfetto).

Marks are recorded only within `record_timeline`; outside of it, the functions do nothing. The marks
are kept in a ring buffer of fixed size, so the file contains the latest ones. Times are those of
`time.perf_counter`, which on Linux is one clock for all processes of a host, so the files of
several processes can be merged (`outrider bench timeline`).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter as now
from typing import Any, Final, NamedTuple

MAX_MARKS: Final = 1 << 17
"""Maximum number of marks kept, enough for some 10,000 rounds of one process."""
INSTANT: Final = -1.0
"""Value of `TimelineMark.lasted` for an event without a duration."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

__all__ = [
    "MAX_MARKS",
    "TimelineMark",
    "TimelineRecorder",
    "is_recording",
    "mark_instant",
    "now",
    "record_timeline",
    "mark_span",
]


class TimelineMark(NamedTuple):
    """One entry of a timeline: a span of work, or an event without a duration. Times are in seconds
    of `time.perf_counter`."""

    began: float
    lasted: float
    """Duration in seconds; INSTANT for an event without one."""
    name: str
    n: int
    """Number of rows, sessions or nodes that the work covered."""
    track: str | int
    """Line of the timeline that shows the mark: a name, or the id of the thread that recorded the
    mark."""


class TimelineRecorder:
    """Ring buffer of the latest marks of a process. Any thread may add a mark."""

    def __init__(self, process: str, capacity: int = MAX_MARKS) -> None:
        self.process = process
        self._ring: list[TimelineMark | None] = [None] * capacity
        self._places = itertools.count()
        self._threads: dict[int, str] = {}
        """Names of the threads that recorded marks; a thread may end before the file is written."""

    def add_mark(self, began: float, lasted: float, name: str, n: int, track: str) -> None:
        """Record that work on `n` items began at `began` and lasted `lasted` seconds. `track` names
        the line of the timeline that shows it; an empty text means the line of the calling
        thread."""
        # The counter gives each place to one thread only.
        place = next(self._places) % len(self._ring)
        self._ring[place] = TimelineMark(began, lasted, name, n, track or self._calling_thread())

    def _calling_thread(self) -> int:
        """Return the id of the calling thread, and remember its name."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        return thread

    def marks(self) -> list[TimelineMark]:
        """Return the marks in the order of their starts. Of marks with the same start, the longest
        comes first."""
        kept = [mark for mark in self._ring if mark is not None]
        return sorted(kept, key=lambda mark: (mark.began, -mark.lasted))

    def events(self) -> list[dict[str, Any]]:
        """Return the marks as trace events, with times in microseconds. Each track becomes a thread
        of the trace."""
        pid, marks = os.getpid(), self.marks()
        tracks = {track: place for place, track in enumerate(dict.fromkeys(m.track for m in marks))}
        events: list[dict[str, Any]] = [_about(pid, 0, "process_name", self.process)]
        for track, tid in tracks.items():
            name = track if isinstance(track, str) else self._threads[track]
            events.append(_about(pid, tid, "thread_name", name))
        free: dict[str | int, float] = {}
        for mark in marks:
            began, ended = mark.began, mark.began + max(mark.lasted, 0.0)
            if isinstance(mark.track, str):
                # Ends that were noticed late: on a track of its own one thing follows the other.
                began = min(max(began, free.get(mark.track, 0.0)), ended)
                free[mark.track] = ended
            event = {
                "name": mark.name,
                "pid": pid,
                "tid": tracks[mark.track],
                "ts": round(began * 1e6, 3),
                "args": {"n": mark.n},
            }
            if mark.lasted == INSTANT:
                events.append(event | {"ph": "i", "s": "t"})
            else:
                events.append(event | {"ph": "X", "dur": round((ended - began) * 1e6, 3)})
        return events

    def write(self, path: Path) -> None:
        """Write the trace events to a file."""
        content = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {"process": self.process, "clock": _clock()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")


_recorder: TimelineRecorder | None = None


def mark_span(name: str, began: float, n: int = 0, *, ended: float = 0.0, track: str = "") -> None:
    """Record a span of work that began at `began`, a time of `now`, and ended at `ended`. An
    `ended` of 0 means the current time. `n` is the number of items that the work covered. `track`
    names the line of the timeline that shows the span; an empty text means the line of this
    thread."""
    if _recorder is not None:
        _recorder.add_mark(began, max(0.0, (ended or now()) - began), name, n, track)


def mark_instant(name: str, n: int = 0, *, track: str = "") -> None:
    """Record an event at the current time. `n` and `track` are as in `mark_span`."""
    if _recorder is not None:
        _recorder.add_mark(now(), INSTANT, name, n, track)


def is_recording() -> bool:
    """Return whether marks are recorded."""
    return _recorder is not None


@contextmanager
def record_timeline(path: str | Path, process: str) -> Generator[None]:
    """Record marks within the context, then write them to the file `path`. With an empty path
    nothing is recorded. `process` is the name of this process in the file."""
    global _recorder
    if not path:
        yield
        return
    recorder = _recorder = TimelineRecorder(process)
    try:
        yield
    finally:
        _recorder = None
        recorder.write(Path(path))


def _about(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _clock() -> str:
    """Return an identifier of this host's clock."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename
