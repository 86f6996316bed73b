"""The timeline of a process: nothing unless it is wanted, bounded, and as Perfetto reads it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from outrider import timeline
from outrider.timeline import INSTANT, TimelineRecorder


def events_of(recorder: TimelineRecorder) -> list[dict[str, Any]]:
    """Its events but for the names of process and tracks."""
    return [event for event in recorder.events() if event["ph"] != "M"]


def test_nothing_is_kept_or_written_unless_it_is_wanted(tmp_path: Path) -> None:
    with timeline.record_timeline("", "drafter"):
        timeline.mark_span("draft", timeline.now())
        timeline.mark_instant("hit")
    assert list(tmp_path.iterdir()) == []


def test_what_is_marked_while_recording_is_in_the_file_and_nothing_after(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "drafter.json"
    with timeline.record_timeline(file, "drafter"):
        began = timeline.now()
        timeline.mark_instant("hit", 2)
        timeline.mark_span("draft", began, 3)
    timeline.mark_span("later", began)
    content = json.loads(file.read_text())
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    instants = [event for event in content["traceEvents"] if event["ph"] == "i"]
    assert [(e["name"], e["args"]["n"]) for e in spans] == [("draft", 3)]
    assert [(e["name"], e["args"]["n"]) for e in instants] == [("hit", 2)]
    assert spans[0]["ts"] <= instants[0]["ts"] <= spans[0]["ts"] + spans[0]["dur"]
    assert content["otherData"]["process"] == "drafter" and content["otherData"]["clock"]


def test_a_file_is_written_even_if_the_process_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), timeline.record_timeline(tmp_path / "t.json", "verifier"):
        timeline.mark_instant("last")
        raise RuntimeError
    assert "last" in (tmp_path / "t.json").read_text()


def test_every_event_has_the_keys_that_its_kind_needs() -> None:
    recorder = TimelineRecorder("verifier")
    recorder.add_mark(1.0, 0.5, "settle", 1, "")
    recorder.add_mark(1.1, INSTANT, "hit", 1, "")
    recorder.add_mark(0.5, 0.25, "forward", 8, "device")
    kinds = {"M": {"args"}, "X": {"ts", "dur"}, "i": {"ts", "s"}}
    for event in recorder.events():
        assert set(event) >= {"ph", "name", "pid", "tid"} | kinds[event["ph"]]
    names = [e["args"]["name"] for e in recorder.events() if e["name"] == "thread_name"]
    assert names == ["device", threading.current_thread().name]
    assert [(e["ts"], e.get("dur")) for e in events_of(recorder)] == [
        (500_000.0, 250_000.0),
        (1_000_000.0, 500_000.0),
        (1_100_000.0, None),
    ]


def test_the_ring_keeps_the_last_marks_of_all_threads() -> None:
    recorder = TimelineRecorder("drafter", capacity=64)

    def work(first: int) -> None:
        for number in range(first, first + 1000):
            recorder.add_mark(float(number), 1.0, "step", number, "")

    threads = [threading.Thread(target=work, args=(n * 1000,), name=f"t{n}") for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(5000)
    assert [mark.n for mark in recorder.marks()] == list(range(5936, 6000))


def test_on_a_track_of_its_own_one_thing_follows_the_other() -> None:
    recorder = TimelineRecorder("verifier")
    recorder.add_mark(1.0, 1.0, "forward", 1, "device")
    recorder.add_mark(1.75, 1.0, "forward", 2, "device")
    recorder.add_mark(1.0, 3.0, "settle", 1, "")
    recorder.add_mark(2.0, 1.0, "tell", 1, "")
    spans = [(e["name"], e["ts"], e["dur"]) for e in events_of(recorder)]
    assert spans == [
        ("settle", 1e6, 3e6),
        ("forward", 1e6, 1e6),
        ("forward", 2e6, 0.75e6),
        ("tell", 2e6, 1e6),
    ]
