"""Fuzz runner: fuzzes every decoder in worker processes and checks how much their memory grows."""

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
"""Maximum growth of a process's memory from the end of the first part of its frames to the end of
the last one, in MB."""
_CHUNK = 50_000


@dataclass(slots=True)
class PortReport:
    """Result of fuzzing the decoders of one port, with the growth of memory and the duration."""

    report: FuzzReport
    growth_mb: float
    seconds: float


def parse_ports(text: str) -> tuple[str, ...]:
    """Return the names of the ports in a comma-separated list; all ports for "". Raises
    InvalidRequestError for an unknown name."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in EVERY_PORT:
            raise InvalidRequestError(
                f"a port must be one of {', '.join(EVERY_PORT)}, got {name!r}",
                reason="UNKNOWN_PORT",
            )
    return names or EVERY_PORT


def run_fuzz(frames: int, *, seed: int, jobs: int, ports: Sequence[str] = EVERY_PORT) -> int:
    """Feed `frames` malformed frames to the decoders of each port and print the results. Return the
    exit status: 1 if a decoder failed or memory grew too much, else 0."""
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
    """Feed `frames` malformed frames to the decoders of a port, in several parts. The growth of
    memory is measured from the end of the first part to the end."""
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
    """Return a valid frame of every kind, as stored in the tests of this project. Without a
    checkout of the repository the list is empty."""
    golden = Path(outrider.__file__).parent.parent / "tests" / "wire" / "golden_v1.txt"
    if not golden.is_file():
        return []
    lines = golden.read_text(encoding="utf-8").splitlines()
    return [bytes.fromhex(line.partition(" ")[2]) for line in lines]


def _resident_mb() -> float:
    """Return the resident memory of this process in MB, after garbage collection.

    Memory that the allocator has freed but keeps is first returned to the system, because its
    amount depends on what ran before. The peak is not used, because a single large frame may cause
    it.
    """
    gc.collect()
    _trim_heap()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _trim_heap() -> None:
    """Return the free memory of the C library's heap to the system. Only glibc supports this."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
