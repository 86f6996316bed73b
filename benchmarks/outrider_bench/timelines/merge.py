"""Merge of the timelines of several processes of one host, for Perfetto and as a picture.

Each process writes its own timeline (`outrider serve --trace-dir`,
`outrider bench serve --trace-dir`). In the merged timeline the earliest event is at time 0. The
picture shows some milliseconds, by default from the middle of the timeline. A span that contains
other spans is drawn around them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider_bench.gpu.support.svg import write_svg
from outrider_bench.gpu.support.trace import TrackSpan
from outrider_bench.report import print_progress
from outrider_bench.serve.results import write
from outrider_bench.timelines import lock_step_gaps

Event = dict[str, Any]

_KINDS: Final = ("M", "X", "i")
_WAITS: Final = "wait"
"""Prefix of the names of spans in which a process waits."""
_SHOWN_MS: Final = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE.json", help="one of each process")
    add("-o", "--out", type=Path, metavar="FILE.json", help="opens in Perfetto")
    add("--svg", type=Path, metavar="FILE.svg", help="a picture of a part of it")
    add("--from-ms", type=float, help="where the picture begins; default: in the middle")
    add("--for-ms", type=float, default=_SHOWN_MS, help=f"how much; default: {_SHOWN_MS:g}")
    add(
        "--gaps",
        action="store_true",
        help="of a verifier and its drafter: what is between two forwards in lock-step",
    )
    add("--gaps-out", type=Path, metavar="PART.json", help="write exchange_us for service.json")
    add("--idle-cores", action="store_true", help="there, say that no cores were kept busy-polling")


def run(args: argparse.Namespace) -> None:
    """Merge the timelines and draw them. Raises InvalidRequestError if a file is not a timeline, or
    the timelines are of several hosts."""
    timelines = [read_timeline(path) for path in args.files]
    if not (args.out or args.svg or args.gaps or args.gaps_out):
        raise InvalidRequestError(
            "what is to be done with them? Give --out, --svg, --gaps or --gaps-out",
            reason="NOTHING_ASKED",
        )
    if args.gaps or args.gaps_out:
        _show_gaps(timelines, args.gaps_out, suffix="-idle-cores" if args.idle_cores else "")
    if args.out is not None or args.svg is not None:
        _show(merge_timelines(timelines), args)


def _show_gaps(timelines: Sequence[Event], out: Path | None, suffix: str) -> None:
    common_clock(timelines)
    found = lock_step_gaps.find_gaps(timelines)
    print(lock_step_gaps.describe_gaps(found))
    if out is not None:
        exchange = {f"{rows}{suffix}": us for rows, us in lock_step_gaps.exchange_us(found).items()}
        write(out, {"exchange_us": exchange})


def _show(content: Event, args: argparse.Namespace) -> None:
    """Write the merged timeline to a file, and draw it as a picture."""
    events = content["traceEvents"]
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(content), encoding="utf-8")
        happened = [event for event in events if event["ph"] != "M"]
        print_progress(f"{len(happened)} events of {len(args.files)} processes in {args.out}")
    if args.svg is not None:
        spans, tracks = spans_of(events)
        begin = middle_ms(spans) if args.from_ms is None else args.from_ms
        shown = clip_spans(spans, begin, begin + args.for_ms)
        if not shown:
            raise InvalidRequestError("nothing happens in that part", reason="NO_EVENTS")
        there = {span.track for span in shown}
        title = f"{args.for_ms:g} ms of {', '.join(content['otherData']['processes'])}"
        write_svg(args.svg, shown, [track for track in tracks if track in there], title=title)


def read_timeline(path: Path) -> Event:
    """Return the timeline in a file. Raises InvalidRequestError if the file is not a timeline."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content["otherData"]
        fine = all(
            event["ph"] in _KINDS and "pid" in event and "tid" in event and "name" in event
            for event in content["traceEvents"]
        )
        if fine and about["process"] and about["clock"]:
            return dict(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path}: {error!r}", reason="NO_TIMELINE") from None
    raise InvalidRequestError(f"{path} is no timeline of a process", reason="NO_TIMELINE")


def common_clock(timelines: Sequence[Event]) -> str:
    """Return the name of the clock that all timelines share. Raises InvalidRequestError if they
    have different clocks."""
    clocks = {timeline["otherData"]["clock"] for timeline in timelines}
    if len(clocks) > 1:
        raise InvalidRequestError(
            "these are of several hosts, whose clocks have nothing in common", reason="CLOCKS"
        )
    return str(next(iter(clocks), ""))


def merge_timelines(timelines: Sequence[Event]) -> Event:
    """Return one timeline with the events of all timelines, sorted by time and beginning at time 0.
    Each process gets a process id of its own. Raises InvalidRequestError if the timelines have
    different clocks."""
    clock = common_clock(timelines)
    about: list[Event] = []
    happened: list[Event] = []
    for place, timeline in enumerate(timelines):
        for event in timeline["traceEvents"]:
            # Ids of processes in several containers may be the same.
            (about if event["ph"] == "M" else happened).append({**event, "pid": place + 1})
        order = {"ph": "M", "name": "process_sort_index", "pid": place + 1, "tid": 0}
        about.append({**order, "args": {"sort_index": place}})
    origin = min((event["ts"] for event in happened), default=0.0)
    for event in happened:
        event["ts"] = round(event["ts"] - origin, 3)
    happened.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    names = [timeline["otherData"]["process"] for timeline in timelines]
    return {
        "traceEvents": about + happened,
        "displayTimeUnit": "ms",
        "otherData": {"processes": names, "clock": clock},
    }


def spans_of(events: Sequence[Event]) -> tuple[list[TrackSpan], list[str]]:
    """Return the spans of the events, with times in milliseconds, and the names of the tracks. The
    tracks of a process are adjacent. An instant event becomes a span of length 0."""
    named = {
        what: {
            (event["pid"], event["tid"] if what == "thread_name" else 0): event["args"]["name"]
            for event in events
            if event["name"] == what
        }
        for what in ("process_name", "thread_name")
    }
    tracks = {
        place: f"{named['process_name'][place[0], 0]}: {name}"
        for place, name in sorted(named["thread_name"].items())
    }
    spans = [
        TrackSpan(
            tracks[event["pid"], event["tid"]],
            event["name"],
            event["ts"] / 1000.0,
            (event["ts"] + event.get("dur", 0.0)) / 1000.0,
        )
        for event in events
        if event["ph"] != "M"
    ]
    return spans, list(tracks.values())


def middle_ms(spans: Sequence[TrackSpan]) -> float:
    """Return the median of the start times of all spans, in milliseconds; 0 without spans. Spans in
    which a process waits are left out."""
    work = [span.start_ms for span in spans if not span.name.startswith(_WAITS)]
    return median(work) if work else 0.0


def clip_spans(spans: Sequence[TrackSpan], begin_ms: float, end_ms: float) -> list[TrackSpan]:
    """Return the spans that overlap the time between `begin_ms` and `end_ms`, cut off at both
    ends."""
    return [
        TrackSpan(span.track, span.name, max(span.start_ms, begin_ms), min(span.end_ms, end_ms))
        for span in spans
        if span.start_ms < end_ms and span.end_ms >= begin_ms
    ]
