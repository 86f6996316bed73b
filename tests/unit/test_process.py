"""What a process that serves does to itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_OWN = ("MALLOC", "OMP_")
"""What an operator's settings of memory and threads have in their names."""


def said(code: str, *args: str, **settings: str) -> list[str]:
    """The words that a program prints where an operator has set only these."""
    known = {
        name: value for name, value in os.environ.items() if not any(own in name for own in _OWN)
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**known, **settings},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


_FAULTS = """
import resource
from outrider.process_tuning import keep_freed_memory
keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
kept = b""
for number in range(60):
    if number == 10:
        before = faults()
    kept = bytes(bytearray(3 << 20))
print((faults() - before) / 50)
"""
_PAGES = 2 * (3 << 20) // 4096
"""Of the buffers that come and go each time."""


def _faults(**settings: str) -> float:
    """Page faults for each time."""
    return float(*said(_FAULTS, **settings))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="faults are counted on Linux")
def test_large_buffers_that_come_and_go_cost_no_page_faults() -> None:
    assert _faults() < _PAGES / 20


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="faults are counted on Linux")
def test_what_an_operator_says_of_freed_memory_stands() -> None:
    assert _faults(MALLOC_MMAP_THRESHOLD_="65536") > _PAGES / 4


_COLLECTIONS = """
import gc
from outrider.process_tuning import tune_garbage_collector
tune_garbage_collector()
full = gc.get_stats()[2]["collections"]
kept = []
for number in range(3_000_000):
    # As a router keeps what it said: each survives a while.
    kept.append([number])
    if len(kept) > 50_000:
        kept = kept[25_000:]
print(gc.get_freeze_count(), gc.get_stats()[2]["collections"] - full)
"""


def test_what_stays_is_not_walked_over_and_the_rest_seldom() -> None:
    frozen, full = map(int, said(_COLLECTIONS))
    assert frozen > 10_000
    # By Python's own thresholds 31.
    assert full <= 8


_TEAMS = """
import asyncio, os, time
import torch
from outrider.process_tuning import run_in_short_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.ones(1 << 20).sum()
    return threads()

async def main():
    before = threads()
    during = await run_in_short_thread(compute)
    until = time.monotonic() + 10.0
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    kept = await asyncio.to_thread(compute)
    time.sleep(0.5)
    print(during - before, threads() - before)

torch.set_num_threads(3)
asyncio.run(main())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted on Linux")
def test_a_thread_that_loads_a_model_leaves_no_team_behind() -> None:
    # Three that compute, then none; an executor's thread keeps its own and all of them.
    assert said(_TEAMS) == ["3", "3"]


_SPINS = """
import os, sys
from outrider.process_tuning import set_openmp_spin
set_openmp_spin()
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("settings", "spins"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_wait_awake_as_an_operator_says_or_briefly(
    settings: dict[str, str], spins: str
) -> None:
    assert said(_SPINS, **settings) == [spins, "False"]


_STARTS = """
import os, sys, threading, time, types
program = __import__(sys.argv[1], fromlist=["main"])
from outrider.errors import InvalidRequestError
seen = {}

def build_service(*parts):
    # OpenMP's library reads it when torch is loaded.
    seen.update(spins=os.environ.get("GOMP_SPINCOUNT"), torch="torch" in sys.modules)
    seen["thread"] = threading.current_thread()

def tune_process():
    until = time.monotonic() + 10.0
    while seen["thread"].is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    print(seen["spins"], seen["torch"], seen["thread"].is_alive())
    raise InvalidRequestError("enough", reason="TEST")

name = sys.argv[2]
sys.modules[name] = types.ModuleType(name)
sys.modules[name].build_service = build_service
program.tune_process = tune_process
program.main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("module", "builder", "flags"),
    [
        (
            "outrider_verifier.__main__",
            "outrider_verifier.server.service_builder",
            ("--model", "m"),
        ),
        ("outrider_drafter.__main__", "outrider_drafter.server.build", ("--methods", "ngram")),
    ],
)
def test_a_process_loads_in_a_thread_that_ends_and_torch_once_that_is_said(
    module: str, builder: str, flags: tuple[str, ...]
) -> None:
    assert said(_STARTS, module, builder, *flags) == ["20000", "False", "False"]
