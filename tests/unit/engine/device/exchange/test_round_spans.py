"""RoundSpans marks what a device did in a round, at the time that the host's clock had then."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.device.exchange import device_clock
from outrider.engine.device.exchange.device_clock import DeviceClock
from outrider.engine.device.exchange.round_spans import (
    DRAFTER_STEPS,
    VERIFIER_STEPS,
    RoundSpans,
)
from outrider.engine.kernels.exchange.buffers import ROUND_TIMES
from outrider.timeline import mark_span, record_timeline

CPU = torch.device("cpu")


def row(*moments: int, rows: int = 4) -> NDArray[np.int64]:
    """A round with these stamps: wait_begin, wait_end, taken, accepted, published."""
    names = ("wait_begin", "wait_end", "taken", "accepted", "published")
    told = dict.fromkeys(ROUND_TIMES, 0) | dict(zip(names, moments, strict=True)) | {"rows": rows}
    return np.array([told[name] for name in ROUND_TIMES])


def marked(
    tmp_path: Path, steps: tuple[str, str, str, str], *rounds: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """The spans of these rounds in a process's timeline."""
    path = tmp_path / "trace.json"
    with record_timeline(path, "verifier"):
        spans = RoundSpans(DeviceClock(CPU), steps, mark_span)
        for each in rounds:
            spans.mark_round(each)
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_each_step_of_a_round_is_a_span(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    stamps = [now + each * 1000 for each in (0, 100, 110, 4000, 4050)]
    spans = marked(tmp_path, VERIFIER_STEPS, row(*stamps))
    assert [each["name"] for each in spans] == list(VERIFIER_STEPS)
    assert [each["dur"] for each in spans] == pytest.approx([100, 10, 3890, 50], abs=1)
    assert {each["args"]["n"] for each in spans} == {4}
    # Stamps of a CPU are of the host's own clock.
    assert spans[0]["ts"] == pytest.approx(now / 1000, abs=50_000)


def test_a_round_that_waits_for_nothing_only_puts(tmp_path: Path) -> None:
    first = row(1000, 2000, 3000, 4000, 5000)
    prefill = row(1000, 2000, 3000, 9000, 9500, rows=-1)
    spans = marked(tmp_path, VERIFIER_STEPS, first, prefill)
    assert [each["name"] for each in spans[4:]] == ["put rows"]
    assert spans[4]["args"]["n"] == 0


def test_a_round_without_drafts_drafts_for_no_time(tmp_path: Path) -> None:
    first = row(1000, 2000, 3000, 4000, 5000)
    prefill = row(6000, 7000, 8000, 4000, 9000)
    spans = marked(tmp_path, DRAFTER_STEPS, first, prefill)
    assert [each["name"] for each in spans[4:]] == ["wait for a round", "take rows", "put drafts"]


def test_the_offset_is_that_of_the_shortest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 10**18
    delays = iter([0.005] * 5 + [0.0] + [0.005] * 20)

    def write(moment: torch.Tensor, address: torch.Tensor) -> None:
        time.sleep(next(delays))
        moment[0] = time.perf_counter_ns() + ahead

    monkeypatch.setattr(device_clock, "write_clock", write)
    clock = DeviceClock(CPU)
    assert clock.error_s < 0.0025
    before = time.perf_counter()
    told = clock.host_time(time.perf_counter_ns() + ahead)
    assert told == pytest.approx(before, abs=clock.error_s + 0.005)
