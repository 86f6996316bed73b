"""`outrider bench round-census` with real processes over the tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_it_counts_files_and_kinds_of_both_processes(tiny_target: Path, tiny_head: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "outrider_bench", "round-census", "--json", "--threads", "1"]
    command += ["--model", str(tiny_target), "--head", str(tiny_head), "--max-tokens", "1500"]
    done = subprocess.run(
        command,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=200.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    drafted, plain = result["drafted"], result["plain"]
    assert set(drafted) == {"verifier", "drafter"} and set(plain) == {"verifier"}
    assert "outrider_verifier.engine.round_executor" in plain["verifier"]["files"]
    assert "outrider_verifier.model_runner.batch.VerifyRow" in drafted["verifier"]["kinds"]
    assert "outrider_drafter.server.draft_engine" in drafted["drafter"]["files"]
    assert len(plain["verifier"]["files"]) < len(drafted["verifier"]["files"])
