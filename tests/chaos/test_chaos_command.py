"""`outrider chaos` for a running fleet, from the outside: a report and an exit status."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.stack import Stack


def chaos(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.client.cli", "chaos", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_fleet_that_is_stopped_now_and_then_keeps_its_promises(stack: Stack) -> None:
    flags = ["--router", stack.router.address, "--process", f"drafter={stack.drafter.pid}"]
    short = ["--duration-s", "3", "--every-s", "0.8", "--concurrency", "4", "--max-tokens", "24"]
    done = chaos(*flags, *short)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "texts that are not those of a calm run: 0" in done.stdout
    assert f"stop drafter {stack.drafter.pid}" in done.stdout
