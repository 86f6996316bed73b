"""What a round in lock-step waits for is read off two timelines, step by step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from outrider_bench.timelines import lock_step_gaps, merge

from outrider.errors import InvalidRequestError
from outrider.timeline import TimelineRecorder

DURATIONS_US = (10, 20, 30, 40, 50, 600, 70, 80, 90, 100, 110, 120)
"""Of each step, all different, so that none can be taken for another."""
FORWARD_US = 1000


class Timelines:
    """A verifier's and a drafter's recorders, and the moment that they have come to."""

    def __init__(self) -> None:
        self.verifier, self.drafter = TimelineRecorder("verifier"), TimelineRecorder("drafter")
        self.at = 5_000.0

    def mark(
        self, who: TimelineRecorder, name: str, began: float, lasted: float, n: int = 1
    ) -> None:
        track = name if name in ("forward", "device") else "thread"
        who.add_mark(began / 1e6, lasted / 1e6, name, n, track)

    def forward(self, rows: int) -> None:
        self.mark(self.verifier, "forward", self.at, FORWARD_US, rows)
        self.at += FORWARD_US

    def gap(self, steps: Sequence[float] = DURATIONS_US, *, device: bool = True) -> None:
        """A round's gap in lock-step, each step so long."""
        moments = [self.at]
        for step in steps:
            moments.append(moments[-1] + step)
        names = ("tell", "take in", "draft", "device", "answer", "send", "back", "plan", "submit")
        at = dict(zip(names, (*moments[1:2], *moments[3:8], *moments[9:12]), strict=True))
        self.mark(self.verifier, "tell", at["tell"], steps[1])
        # Events to routers are told later, while the drafter works.
        self.mark(self.verifier, "tell", at["device"], 5)
        self.mark(self.drafter, "take in", at["take in"], steps[3] - 1)
        self.mark(self.drafter, "draft", at["draft"], sum(steps[4:7]))
        if device:
            self.mark(self.drafter, "device", at["device"], steps[5])
        self.mark(self.drafter, "send", at["send"], steps[7])
        self.mark(self.verifier, "take in", at["back"], steps[9] - 1)
        self.mark(self.verifier, "plan", at["plan"], steps[10] - 1)
        self.mark(self.verifier, "submit", at["submit"], steps[11] + 3)
        self.at = moments[-1]

    def content(self, tmp_path: Path) -> list[Path]:
        paths = [tmp_path / "v.json", tmp_path / "d.json"]
        for recorder, path in zip((self.verifier, self.drafter), paths, strict=True):
            recorder.write(path)
        return paths


def in_lock_step(rounds: int, rows: int = 1) -> Timelines:
    made = Timelines()
    for _ in range(rounds):
        made.forward(rows)
        made.gap()
    made.forward(rows)
    return made


def found(made: Timelines, tmp_path: Path) -> list[lock_step_gaps.RoundGap]:
    return lock_step_gaps.find_gaps([merge.read_timeline(path) for path in made.content(tmp_path)])


def test_each_step_of_a_gap_has_its_own_time(tmp_path: Path) -> None:
    seen = found(in_lock_step(9), tmp_path)
    assert [gap.rows for gap in seen] == [1] * 9
    for gap in seen:
        assert gap.steps == pytest.approx(DURATIONS_US, abs=0.01)


def test_the_exchange_is_all_but_what_the_drafters_device_does(tmp_path: Path) -> None:
    (gap, *_) = found(in_lock_step(9), tmp_path)
    assert gap.exchange_us == pytest.approx(sum(DURATIONS_US) - 600, abs=0.01)


def test_a_gap_with_two_batches_of_drafts_or_none_tells_nothing(tmp_path: Path) -> None:
    made = in_lock_step(1)
    # A second batch in one gap, of the other half of the sessions; then a round without drafts.
    made.mark(made.drafter, "draft", made.at + 1, 5)
    made.gap()
    made.forward(1)
    made.at += 200
    made.forward(1)
    assert len(found(made, tmp_path)) == 1


def test_where_no_device_is_marked_all_of_a_draft_is_taken_for_its(tmp_path: Path) -> None:
    made = Timelines()
    for _ in range(2):
        made.forward(3)
        made.gap(device=False)
    made.forward(3)
    (gap, *_) = found(made, tmp_path)
    steps = dict(zip(lock_step_gaps.STEPS, gap.steps, strict=True))
    assert (steps["staged"], steps["answered"]) == (0, 0)
    assert steps[lock_step_gaps.DEVICE] == pytest.approx(sum(DURATIONS_US[4:7]), abs=0.01)


def test_rows_of_few_rounds_are_left_out(tmp_path: Path) -> None:
    made = in_lock_step(lock_step_gaps.MIN_GAPS, rows=64)
    made.gap()
    made.forward(63)
    seen = found(made, tmp_path)
    assert {gap.rows for gap in seen} == {63, 64}
    assert set(lock_step_gaps.exchange_us(seen)) == {"64"}


def run(files: Sequence[Path], *flags: str) -> None:
    parser = argparse.ArgumentParser()
    merge.add_arguments(parser)
    merge.run(parser.parse_args([*map(str, files), *flags]))


def test_the_command_prints_a_table_and_writes_a_part_of_service_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, out = in_lock_step(9).content(tmp_path), tmp_path / "new" / "part.json"
    run(files, "--gaps", "--gaps-out", str(out))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:14]] == list(lock_step_gaps.STEPS)
    assert json.loads(out.read_text()) == {"exchange_us": {"1": sum(DURATIONS_US) - 600}}
    run(files, "--gaps-out", str(out), "--idle-cores")
    assert json.loads(out.read_text()) == {"exchange_us": {"1-idle-cores": sum(DURATIONS_US) - 600}}


def test_timelines_without_lock_step_or_of_other_processes_are_refused(tmp_path: Path) -> None:
    files = in_lock_step(1).content(tmp_path)
    with pytest.raises(InvalidRequestError, match="lock-step"):
        run(files, "--gaps")
    with pytest.raises(InvalidRequestError, match="both timelines"):
        run([files[0], files[0]], "--gaps")
    with pytest.raises(InvalidRequestError, match="both timelines"):
        run(files[:1], "--gaps")
    with pytest.raises(InvalidRequestError, match="--gaps"):
        run(files)


def test_timelines_of_several_hosts_are_refused(tmp_path: Path) -> None:
    files = in_lock_step(9).content(tmp_path)
    content = json.loads(files[1].read_text())
    content["otherData"]["clock"] = "another host's"
    files[1].write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match="several hosts"):
        run(files, "--gaps")
