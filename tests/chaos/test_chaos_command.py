"""`outrider chaos` from the outside: a report, an exit status, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.stack import Stack
from tests.waiting import wait_until

COMMAND = [sys.executable, "-m", "outrider.client.commands.main", "chaos"]


def chaos(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_fleet_that_is_stopped_now_and_then_keeps_its_promises(stack: Stack) -> None:
    flags = ["--router", stack.router.address, "--process", f"drafter={stack.drafter.pid}"]
    short = ["--duration-s", "3", "--every-s", "0.8", "--concurrency", "4", "--max-tokens", "24"]
    done = chaos(*flags, *short)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "texts that are not those of a calm run: 0" in done.stdout
    assert f"stop drafter {stack.drafter.pid}" in done.stdout


def test_its_workers_end_with_a_driver_that_is_killed() -> None:
    endless = [*COMMAND, "--fuzz", str(10**12), "--ports", "pool,shm", "--jobs", "2"]
    with subprocess.Popen(endless, stdout=subprocess.PIPE) as driver:
        try:
            children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
            # Two workers, and what tracks their resources.
            wait_until(
                lambda: len(children.read_text().split()) == 3, timeout_s=60.0, what="workers"
            )
        finally:
            driver.kill()
        # All of them write to it: it ends with the last one.
        driver.communicate(timeout=30.0)


def test_a_port_that_there_is_not_is_misuse() -> None:
    done = chaos("--fuzz", "10", "--ports", "verifier control,no port")
    assert done.returncode == 2
    assert "'no port'" in done.stderr and "drafter control" in done.stderr
