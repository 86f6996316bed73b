"""Claimed cores: alone, awake when told, given back however the process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.busy_polling import BusyCores
from outrider.errors import FailedPreconditionError

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []


def children() -> list[int]:
    """Spinners of this process, by pid."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[1]
            if (
                int(parent) == os.getpid()
                and b"polling_process.py" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spends_time(pid: int, *, within_s: float = 10.0) -> bool:
    """Whether the process takes CPU time."""
    began, deadline = cpu_seconds(pid), time.monotonic() + within_s
    while time.monotonic() < deadline:
        if cpu_seconds(pid) > began + 0.02:
            return True
        time.sleep(0.02)
    return False


def gone(pid: int, *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or " Z " in stat.read_text(encoding="ascii"):
            return True
        time.sleep(0.02)
    return False


def test_no_core_costs_nothing() -> None:
    before = os.sched_getaffinity(0)
    with BusyCores.claim(0) as busy_cores:
        busy_cores.set_busy(True)
        busy_cores.adopt_thread()
        assert busy_cores.cores == ()
        assert children() == []
    assert os.sched_getaffinity(0) == before


def test_a_core_is_claimed_once_until_it_is_given_back() -> None:
    with BusyCores.claim(len(ALLOWED)) as busy_cores:
        assert list(busy_cores.cores) == ALLOWED
        with pytest.raises(FailedPreconditionError, match="unclaimed"):
            BusyCores.claim(1)
    BusyCores.claim(1).close()


def test_more_cores_than_there_are_are_refused_and_none_is_kept() -> None:
    with pytest.raises(FailedPreconditionError, match=f"{len(ALLOWED) + 1}"):
        BusyCores.claim(len(ALLOWED) + 1)
    assert children() == []
    BusyCores.claim(len(ALLOWED)).close()


def test_it_spins_only_while_kept_awake_and_in_the_idle_class() -> None:
    with BusyCores.claim(1) as busy_cores:
        (pid,) = children()
        busy_cores.set_busy(True)
        assert spends_time(pid)
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert os.sched_getaffinity(pid) == set(busy_cores.cores)
        busy_cores.set_busy(False)
        time.sleep(0.1)
        assert not spends_time(pid, within_s=0.3)
    assert gone(pid)


def test_threads_run_on_the_cores_and_so_do_those_they_start() -> None:
    seen: list[set[int]] = []

    def grandchild() -> None:
        seen.append(os.sched_getaffinity(0))

    def child(busy_cores: BusyCores) -> None:
        busy_cores.adopt_thread()
        thread = threading.Thread(target=grandchild)
        thread.start()
        thread.join()

    with BusyCores.claim(1) as busy_cores:
        thread = threading.Thread(target=child, args=(busy_cores,))
        thread.start()
        thread.join()
        assert seen == [set(busy_cores.cores)]


def test_a_killed_spinner_harms_nobody() -> None:
    with BusyCores.claim(1) as busy_cores:
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        busy_cores.set_busy(True)
        busy_cores.set_busy(False)


@pytest.mark.parametrize("kept", [True, False])
def test_a_killed_process_takes_its_spinners_along_and_gives_its_cores_back(kept: bool) -> None:
    code = (
        "import sys, time\n"
        "from outrider.busy_polling import BusyCores\n"
        "awake = BusyCores.claim(1)\n"
        f"awake.set_busy({kept})\n"
        "print(awake._spinners[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    spinner = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert gone(spinner)
    BusyCores.claim(len(ALLOWED)).close()
