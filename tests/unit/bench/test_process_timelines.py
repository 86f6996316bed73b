"""Timelines of several processes become one: sorted, on one clock, and drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from outrider_bench.timelines import merge

from outrider.errors import InvalidRequestError
from outrider.timeline import INSTANT, TimelineRecorder


def written(path: Path, process: str, *marks: tuple[float, float, str]) -> Path:
    """A file of a process with marks (seconds) on one thread of its own."""
    recorder = TimelineRecorder(process)
    for began, lasted, name in marks:
        recorder.add_mark(began, lasted, name, 1, f"{process}'s")
    recorder.write(path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of a verifier and its drafter, 30 ms."""
    return [
        written(
            tmp_path / "v.json",
            "verifier",
            (100.010, 0.004, "forward"),
            (100.015, INSTANT, "hit"),
            (100.020, 0.004, "forward"),
        ),
        written(
            tmp_path / "d.json",
            "drafter",
            (100.000, 0.010, "wait"),
            (100.014, 0.001, "draft"),
        ),
    ]


def run(files: list[Path], out: Path, *flags: str) -> dict[str, Any]:
    """The command; what it wrote."""
    parser = argparse.ArgumentParser()
    merge.add_arguments(parser)
    merge.run(parser.parse_args([*map(str, files), "-o", str(out), *flags]))
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_events_of_all_processes_are_in_order_from_0_on(files: list[Path], tmp_path: Path) -> None:
    content = run(files, tmp_path / "out" / "both.json")
    events = [event for event in content["traceEvents"] if event["ph"] != "M"]
    assert [(event["name"], event["pid"], event["ts"]) for event in events] == [
        ("wait", 2, 0.0),
        ("forward", 1, 10_000.0),
        ("draft", 2, 14_000.0),
        ("hit", 1, 15_000.0),
        ("forward", 1, 20_000.0),
    ]
    assert all({"ph", "pid", "tid", "ts", "name"} <= set(event) for event in events)
    names = {
        event["pid"]: event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {1: "verifier", 2: "drafter"}
    assert content["otherData"]["processes"] == ["verifier", "drafter"]


def test_the_picture_shows_a_part_with_its_moments(files: list[Path], tmp_path: Path) -> None:
    run(files, tmp_path / "b.json", "--svg", str(tmp_path / "b.svg"), "--from-ms", "12")
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(tmp_path / "b.svg").getroot()
    drawn = [
        element.findtext(f"{space}title") or ""
        for element in root.iter()
        if element.find(f"{space}title") is not None
    ]
    # The wait was over by then; of the first forward the rest is shown.
    assert drawn == ["forward 2000 us", "hit", "forward 4000 us", "draft 1000 us"]
    assert "verifier: verifier's" in [element.text for element in root.iter(f"{space}text")]


def test_the_picture_is_of_the_middle_of_the_work_unless_told(files: list[Path]) -> None:
    merged = merge.merge_timelines([merge.read_timeline(path) for path in files])
    spans, tracks = merge.spans_of(merged["traceEvents"])
    assert tracks == ["verifier: verifier's", "drafter: drafter's"]
    assert merge.middle_ms(spans) == pytest.approx(14.5)
    assert merge.clip_spans(spans, 100.0, 200.0) == []


def test_an_empty_part_and_foreign_files_are_refused(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    with pytest.raises(InvalidRequestError, match="nothing happens"):
        run(files, out, "--svg", str(tmp_path / "o.svg"), "--from-ms", "500")
    foreign = json.loads(files[1].read_text())
    foreign["otherData"]["clock"] = "another host"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(foreign))
    with pytest.raises(InvalidRequestError, match="several hosts"):
        run([files[0], other], out)
    for text in ("", "[]", "{}", '{"traceEvents": [{"ph": "Z"}], "otherData": {}}'):
        other.write_text(text)
        with pytest.raises(InvalidRequestError, match=r"other\.json"):
            run([other], out)
    with pytest.raises(InvalidRequestError, match="missing"):
        run([tmp_path / "missing.json"], out)
