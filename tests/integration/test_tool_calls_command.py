"""`outrider bench tool-calls` with real processes over the tiny model: arguments of required calls
fit their schemas, and streams and drafts change no answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.bench_command import run_bench

REQUESTS = 12


@pytest.mark.timeout(300)
def test_calls_of_many_tool_sets_are_valid_and_the_same_with_every_drafter(
    tiny_target: Path, tiny_head: Path
) -> None:
    flags: dict[str, object] = {
        "model": tiny_target,
        "head": tiny_head,
        "threads": 1,
        "dtype": "float32",
        "requests": REQUESTS,
        "tool-sets": 6,
        "max-model-len": 16384,
        "max-tokens": 250,
        "drafts": "chain4,tree8,ngram",
    }
    done = run_bench("tool-calls", flags, timeout_s=280.0)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # Random weights write many calls up to max_tokens.
    assert result["valid"] > 0 and not result["failures"]
    assert result["valid"] + result["cut_by_max_tokens"] == REQUESTS
    cells = {cell["configuration"]: cell for cell in result["cells"]}
    assert list(cells) == ["chain4", "tree8", "ngram"]
    for cell in cells.values():
        assert cell["same"] == cell["of"] == REQUESTS
    assert cells["tree8"]["accepted"] > 0
