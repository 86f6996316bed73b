"""Runs `compile_ahead_cases.py` in a process of its own: where kernels were interpreted, Triton
compiles none any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("compile_ahead_cases.py")
ROOT = CASES.parents[4]


def test_kernels_are_compiled_ahead_by_threads() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
