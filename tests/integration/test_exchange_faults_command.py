"""`outrider bench exchange-faults` with real processes over the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.bench_command import run_bench

KINDS = ["garbage-drafts", "stop", "cancel"]


@pytest.mark.timeout(240)
def test_faults_are_counted_and_change_no_text(tiny_target: Path, tiny_head: Path) -> None:
    flags: dict[str, object] = {
        "model": tiny_target,
        "head": tiny_head,
        "threads": 1,
        "faults": 4,
        "kinds": ",".join(KINDS),
        "streams": 2,
        "max-tokens": 48,
    }
    done = run_bench("exchange-faults", flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["faults"].values()) == 4 and set(result["faults"]) <= set(KINDS)
    assert result["requests_with_drafts"] > 0
    assert (result["changed_texts"], result["near_ties"], result["failed"]) == (0, 0, [])
    assert result["not_reopened"] == 0 < result["exchanges_opened"]
    assert 0.0 < result["longest_gap_s"] < 30.0
