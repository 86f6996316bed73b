"""Runtime tuning of a process: event loop (uvloop), garbage collector, allocator, OpenMP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

ResultT = TypeVar("ResultT")

SWITCH_INTERVAL_S = 0.0005
"""Python's own 5 ms is longer than a draft step, or a round outside its forward, may take: a thread
that waits for the interpreter lock would stall the others by that much."""
FULL_COLLECTION_INTERVAL: Final = 100
"""Collections of the middle generation between two of all objects. With Python's own 10 a busy
router went over all that it keeps of its answers every two or three seconds, for up to 180 ms."""
MAX_FILES: Final = 1 << 16
"""Open files that no process of a fleet needs more than."""
KEPT_HEAP_BYTES: Final = 128 << 20
"""Freed memory at the end of a heap that goes back to the system only beyond this size."""
OMP_SPIN_COUNT: Final = 20_000
"""About a millisecond where a pause takes 140 cycles, a quarter of it where it takes 40."""
_SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_LARGEST_IN_HEAP: Final = 32 << 20
"""The most that glibc allows."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
_OWN_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def run_event_loop(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run` on uvloop where it is installed: a gRPC round trip takes a tenth less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def run_in_short_thread(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """`function(*args)` in a thread that ends with the call, as no thread of `asyncio.to_thread`
    does: for work that computes on the CPU in a process where another thread will.

    OpenMP keeps a team of threads for every thread that has computed, as long as that lives. Once
    there are more of them in a process than processors, libgomp's no longer wait awake from one
    product to the next, and a forward of 30 layers takes a third longer.
    """
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="brief")
    try:
        return await loop.run_in_executor(executor, function, *args)
    finally:
        executor.shutdown(wait=False)


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it; the limit from then on.

    Every connection is a file, and the usual soft limit of 1024 is for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


CERT_HELP = "Certificate of this process; its DNS name is the role of the process."
CA_HELP = "Certificate of the authority that signed the other processes' certificates."


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a process's `tls` table."""
    add = parser.add_argument_group("certificates").add_argument
    add("--tls-cert", metavar="FILE.pem", dest="tls.cert", help=CERT_HELP)
    add("--tls-key", metavar="FILE.pem", dest="tls.key", help="Private key of --tls-cert.")
    add("--tls-ca", metavar="FILE.pem", dest="tls.ca", help=CA_HELP)


def set_openmp_spin() -> None:
    """Let OpenMP's threads wait awake for a millisecond and no longer; call it before torch is
    imported. From one product to the next they need some tens of microseconds. libgomp's own 16 ms
    (Intel Xeon) takes a core from the process whose turn it is after a forward, and from this one's
    event loop. Where an operator has said otherwise in the environment, nothing changes."""
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", _SPIN_COUNT)):
        os.environ[_SPIN_COUNT] = str(OMP_SPIN_COUNT)


def tune_process() -> None:
    """Settings for a process that does nothing but serve; call it once the models are loaded."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    tune_garbage_collector()


def tune_garbage_collector() -> None:
    """Keep the collector of garbage from walking over what stays for the life of the process,
    models, a vocabulary, modules, and let it go over all of the rest seldom: every stream waits
    meanwhile. Call it once all that is loaded."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_INTERVAL)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: a round of 64 sessions has megabytes of features in
    buffers that come and go, and taking each from the system anew costs a page fault for every
    4 KiB, which is more than all that is done with it. Where an operator has said otherwise in the
    environment, and where the library is not glibc, nothing changes."""
    if any(name in os.environ for name in _OWN_SETTINGS):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)
