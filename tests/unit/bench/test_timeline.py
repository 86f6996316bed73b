"""Timelines of rounds: idle gaps, alignment of the tracks, the trace file and the SVG picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from outrider_bench.gpu.support.svg import draw, write_svg
from outrider_bench.gpu.support.timeline import (
    DRAFT,
    HOST,
    TRACKS,
    VERIFY,
    HostTimeline,
    device_spans,
    idle_gaps_us,
    round_overhead_us,
    select_rounds,
    split_ms,
)
from outrider_bench.gpu.support.trace import TrackSpan, trace_events, write_trace

from outrider.engine.device.device_timeline import DeviceSpan

SPANS = [
    TrackSpan(HOST, "submit", 0.0, 0.2),
    TrackSpan(VERIFY, "verify", 0.1, 4.1),
    TrackSpan(DRAFT, "draft", 4.15, 5.0),
    TrackSpan(VERIFY, "verify", 5.1, 9.1),
    TrackSpan(DRAFT, "draft", 9.1, 10.0),
    TrackSpan(VERIFY, "verify", 10.3, 14.3),
]


def test_the_gap_between_forwards_is_less_the_drafting() -> None:
    assert idle_gaps_us(SPANS) == pytest.approx([150.0, 300.0])
    assert round_overhead_us(SPANS) == pytest.approx(225.0)
    assert round_overhead_us(SPANS[:3]) is None


def test_drafting_outside_the_gap_is_not_taken_off() -> None:
    beside = [
        TrackSpan(VERIFY, "verify", 0.0, 4.0),
        TrackSpan(DRAFT, "draft", 3.0, 4.5),
        TrackSpan(VERIFY, "verify", 5.0, 6.0),
    ]
    assert idle_gaps_us(beside) == pytest.approx([500.0])


def test_device_spans_take_their_tracks_and_the_offset() -> None:
    spans = device_spans(
        [
            DeviceSpan("verify", 1.0, 2.0),
            DeviceSpan("draft", 2.0, 2.5),
            DeviceSpan("align", 0.0, 0.1),
        ],
        10.0,
    )
    assert spans == [
        TrackSpan(VERIFY, "verify", 11.0, 12.0),
        TrackSpan(DRAFT, "draft", 12.0, 12.5),
    ]


def test_a_wrapped_method_is_timed_and_behaves_as_before() -> None:
    now = iter([0.0, 1.0, 1.5, 2.0, 2.25])

    class Owner:
        def double(self, value: int) -> int:
            if value < 0:
                raise ValueError("negative")
            return 2 * value

    owner, host = Owner(), HostTimeline(clock=lambda: next(now))
    assert host.wrap(owner, "double", "work") and not host.wrap(owner, "missing", "nothing")
    assert owner.double(21) == 42
    with pytest.raises(ValueError, match="negative"):
        owner.double(-1)
    assert host.spans == [
        TrackSpan(HOST, "work", 1000.0, 1500.0),
        TrackSpan(HOST, "work", 2000.0, 2250.0),
    ]


def test_medians_by_name_and_the_window_of_some_rounds() -> None:
    assert split_ms(SPANS)[f"{DRAFT}: draft"] == pytest.approx(0.875)
    assert [span.start_ms for span in select_rounds(SPANS, 1, skip=1)] == [5.1, 9.1]


def test_the_trace_has_a_track_for_each_and_microseconds(tmp_path: Path) -> None:
    write_trace(tmp_path / "a" / "t.json", SPANS, TRACKS, title="x")
    content = json.loads((tmp_path / "a" / "t.json").read_text())
    assert content["traceEvents"] == trace_events(SPANS, TRACKS)
    bars = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert [bar["ts"] for bar in bars] == sorted(bar["ts"] for bar in bars)
    assert (bars[1]["name"], bars[1]["ts"], bars[1]["dur"]) == ("verify", 100.0, 4000.0)
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"]
    assert names == list(TRACKS) and content["otherData"] == {"title": "x"}


def test_the_picture_is_well_formed_and_to_scale(tmp_path: Path) -> None:
    write_svg(tmp_path / "t.svg", SPANS, TRACKS, title="K < 3 & more")
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [
        (element.findtext(f"{space}title") or "", float(element.get("width", 0)))
        for element in root.iter(f"{space}rect")
        if element.find(f"{space}title") is not None
    ]
    assert len(bars) == len(SPANS)
    verify = next(width for name, width in bars if name == "verify 4000 us")
    draft = next(width for name, width in bars if name == "draft 900 us")
    assert verify / draft == pytest.approx(4000 / 900, rel=0.01)
    with pytest.raises(ValueError, match="at least one"):
        draw([], TRACKS, title="")
