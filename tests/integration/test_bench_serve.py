"""`outrider bench serve` with real processes over the tiny model: what the file says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.bench_command import run_bench

CELL = {
    *("model", "placement", "drafts", "rule", "temperature", "top_p", "sessions", "max_tokens"),
    *("tokens_per_s", "steady_tokens_per_s", "over_plain", "efficiency", "emitted_per_round"),
    *("first_wave_ratio", "ttft_ms", "itl_ms"),
}
FILE = [
    *("commit", "date", "device", "versions", "cells", "exchange_us", "host_ms_at_64"),
    *("round_cost", "events_per_s", "plain_floor_ratio_min"),
]


def bench_serve(flags: dict[str, object], *switches: str) -> subprocess.CompletedProcess[str]:
    """Run the command, of a commit that has a name."""
    return run_bench("serve", flags, *switches, timeout_s=170.0, OUTRIDER_COMMIT="abc")


@pytest.mark.timeout(240)
def test_the_file_has_every_cell_with_every_figure(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    out = tmp_path / "service.json"
    flags = {
        "model": tiny_target,
        "head": tiny_head,
        "placement": "separate",
        "drafts": "chain-2",
        "sessions": "1,2",
        "max-tokens": 64,  # many messages: on busy cores a router joins those of some rounds
        "limit": 4,
        "requests": 4,
        "waves": 2,
        "clients": 2,
        "planner": "fixed",
        "device": "cpu",
        "threads": 1,
        "out": out,
        "plot": tmp_path / "service.svg",
    }
    done = bench_serve(flags)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == content
    assert list(content) == FILE
    assert content["commit"] == "abc"
    found = [(c["placement"], c["drafts"], c["sessions"]) for c in content["cells"]]
    assert found == [
        *(("plain", "none", sessions) for sessions in (1, 2)),
        *(("separate", "chain-2", sessions) for sessions in (1, 2)),
    ]
    for cell in content["cells"]:
        assert set(cell) >= CELL
        assert cell["requests"] == 4 * cell["sessions"]
        assert cell["failed"] == {}
        assert cell["tokens"] <= 64 * cell["requests"]
        figures = (cell[name] for name in CELL - {"temperature"})
        assert all(figure > 0 for figure in figures if isinstance(figure, float))
        assert {"p50", "p90", "p95", "p99"} == set(cell["ttft_ms"]) == set(cell["itl_ms"])
    plain = [cell for cell in content["cells"] if cell["placement"] == "plain"]
    assert all(cell["over_plain"] == 1.0 and cell["proposed_per_round"] == 0 for cell in plain)
    speculating = [cell for cell in content["cells"] if cell["placement"] != "plain"]
    assert all(cell["proposed_per_round"] > 0 for cell in speculating)
    assert all(cell["over_plain"] > 0 for cell in speculating)
    assert content["plain_floor_ratio_min"] is None, "a fixed planner drafts where it was told to"
    assert "separate, chain-2" in (tmp_path / "service.svg").read_text(encoding="utf-8")

    again = bench_serve({**flags, "sessions": "1", "requests": 2}, "--keep-plain")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("starting the verifier") == 1
    kept = [c for c in json.loads(out.read_text())["cells"] if c["placement"] == "plain"]
    assert kept == plain


@pytest.mark.timeout(240)
def test_lock_step_and_look_ahead_stand_beside_each_other_at_every_delay(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    out, traces = tmp_path / "service.json", tmp_path / "traces"
    flags = {
        "model": tiny_target,
        "head": tiny_head,
        "drafts": "chain-2",
        "look-ahead": "0,1",
        "fan-out": 4,
        "exchange-delay-ms": "0,20",
        "sessions": "1",
        "max-tokens": 8,
        "limit": 2,
        "requests": 2,
        "waves": 1,
        "clients": 1,
        "planner": "fixed",
        "device": "cpu",
        "threads": 1,
        "trace-dir": traces,
        "out": out,
    }
    done = bench_serve(flags)
    assert done.returncode == 0, done.stderr
    cells = json.loads(out.read_text(encoding="utf-8"))["cells"]
    found = [(cell["drafts"], cell["exchange_delay_ms"], cell["over_lockstep"]) for cell in cells]
    kinds = [(drafts, delay) for drafts, delay, _ in found]
    both = ("chain-2+lockstep", "chain-2+ahead4")
    assert kinds == [("none", 0.0), *((d, delay) for delay in (0.0, 20.0) for d in both)]
    assert [ratio is not None for *_, ratio in found] == [False, False, True, False, True]
    near, far = (cell["round_ms"] for cell in cells if cell["drafts"] == "chain-2+lockstep")
    # Both ways, in all rounds but those without drafts: the last one of an answer waits for none.
    assert far >= near + 20.0
    assert "20 ms each way" in done.stdout
    folders = {path.name for path in traces.iterdir()}
    assert folders == {"plain-none", *(f"separate-chain-2+lockstep{d}" for d in ("", "-20ms"))}
    # The delay leaves a drafter time to look ahead, however busy its cores are.
    both_sides = traces / "separate-chain-2+lockstep-20ms"
    names = {
        path.name: {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        for path in both_sides.iterdir()
    }
    verifier = {"plan", "submit", "wait for the device", "forward", "settle", "tell", "wait"}
    assert names.keys() == {"drafter-0.json", "verifier-0.json"}
    assert names["verifier-0.json"] > verifier | {"take in"}
    assert names["drafter-0.json"] > {"take in", "draft", "score", "branch", "send", "wait"}
    assert names["drafter-0.json"] & {"hit", "miss"}
    assert names["verifier-0.json"] & {"hit", "fresh", "miss"}
