"""Runs `outrider bench` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]


def run_bench(
    name: str,
    flags: dict[str, object],
    *switches: str,
    timeout_s: float = 200.0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a benchmark with `--json` and these flags, on one thread a process."""
    path = os.pathsep.join((str(_CHECKOUT / "benchmarks"), *filter(None, sys.path)))
    return subprocess.run(
        [
            *(sys.executable, "-m", "outrider_bench", name, "--json", *switches),
            *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
        ],
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path, **environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
