"""Fuzz runner: fuzzes every decoder in worker processes and checks their memory."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import outrider
from outrider.chaos.fuzz import PORTS, FuzzReport, fuzz_port
from outrider.chaos.fuzz_shm import PORT as LANE
from outrider.chaos.fuzz_shm import fuzz_shm_channel
from outrider.errors import InvalidRequestError
from outrider_chaos.parent_watch import end_with_parent

EVERY_PORT: Final = (*PORTS, LANE)
MAX_GROWTH_MB = 16.0
"""Of a process between the first piece of its frames and the last."""
_CHUNK = 50_000


@dataclass(slots=True)
class PortReport:
    """Result of fuzzing one port."""

    report: FuzzReport
    growth_mb: float
    seconds: float


def parse_ports(text: str) -> tuple[str, ...]:
    """Ports by name, comma-separated; "" is all of them. InvalidRequestError if one is not."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in EVERY_PORT:
            raise InvalidRequestError(
                f"a port must be one of {', '.join(EVERY_PORT)}, got {name!r}",
                reason="UNKNOWN_PORT",
            )
    return names or EVERY_PORT


def run_fuzz(frames: int, *, seed: int, jobs: int, ports: Sequence[str] = EVERY_PORT) -> int:
    """Feed so many frames to every port and print what came of it; the exit status."""
    context = multiprocessing.get_context("spawn")
    failed = False
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool:
        for done in pool.map(partial(fuzz_decoder, frames=frames, seed=seed), ports):
            rate = frames / max(done.seconds, 1e-9)
            sys.stdout.write(
                f"{done.report}\nmemory grew by {done.growth_mb:.1f} MB, {rate:.0f} frames/s\n"
            )
            sys.stdout.flush()
            failed |= bool(done.report.failures) or done.growth_mb > MAX_GROWTH_MB
    return int(failed)


def fuzz_decoder(port: str, *, frames: int, seed: int) -> PortReport:
    """Feed so many frames to a port, in pieces between which memory is looked at."""
    corpus, report, began = honest_frames(), FuzzReport(), time.monotonic()
    piece = max(1, min(_CHUNK, frames // 10))
    base_mb: float | None = None
    left, number = frames, 0
    while left > 0:
        size = min(piece, left)
        own = seed * 1_000_003 + number
        if port == LANE:
            report.add(fuzz_shm_channel(size, seed=own))
        else:
            report.add(fuzz_port(port, size, seed=own, corpus=corpus))
        left, number = left - size, number + 1
        if base_mb is None:
            base_mb = _resident_mb()
    growth = _resident_mb() - (base_mb or 0.0)
    return PortReport(report, growth, time.monotonic() - began)


def honest_frames() -> list[bytes]:
    """One frame of every kind, where this is a checkout: the golden bytes of its tests."""
    golden = Path(outrider.__file__).parent.parent / "tests" / "wire" / "golden_v1.txt"
    if not golden.is_file():
        return []
    lines = golden.read_text(encoding="utf-8").splitlines()
    return [bytes.fromhex(line.partition(" ")[2]) for line in lines]


def _resident_mb() -> float:
    """What this process holds once garbage is gone; a peak may be that of one large frame.

    Nor is it what the allocator keeps of freed memory: how much that is depends on what ran before.
    """
    gc.collect()
    _trim_heap()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _trim_heap() -> None:
    """Give the system what is free in the C library's heap, where it can be asked (glibc)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
