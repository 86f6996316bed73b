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
"""Interpreter switch interval in seconds. Python's default of 5 ms is longer than a draft step and
would delay all threads that wait for the interpreter lock."""
FULL_COLLECTION_INTERVAL: Final = 100
"""Number of middle-generation collections between two full collections. With Python's default of
10, a busy router ran a full collection of up to 180 ms every two or three seconds."""
MAX_FILES: Final = 1 << 16
"""Number of open files up to which `raise_file_limit` raises the limit; no process needs more."""
KEPT_HEAP_BYTES: Final = 128 << 20
"""Number of free bytes that the C library keeps at the end of the heap. It returns more than that
to the system."""
OMP_SPIN_COUNT: Final = 20_000
"""Spin count of OpenMP threads: about 1 ms if a pause instruction takes 140 cycles, 0.25 ms if it
takes 40."""
_SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_LARGEST_IN_HEAP: Final = 32 << 20
"""Largest threshold that glibc accepts, in bytes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers from malloc.h."""
_OWN_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def run_event_loop(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `main` on uvloop if it is installed, else on asyncio's own event loop. With uvloop, a
    gRPC round trip is a tenth shorter."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def run_in_short_thread(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Run `function(*args)` in a thread that ends with the call, unlike the threads of
    `asyncio.to_thread`. Use this for computations on the CPU before another thread of the process
    computes.

    OpenMP keeps a team of threads for every thread that has computed, until that thread ends. If a
    process has more OpenMP threads than the machine has processors, libgomp's threads no longer
    busy-wait between two matrix products, and a forward pass of 30 layers takes a third longer.
    """
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="brief")
    try:
        return await loop.run_in_executor(executor, function, *args)
    finally:
        executor.shutdown(wait=False)


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit, but at most to MAX_FILES. Returns the soft
    limit that applies afterwards.

    Every connection is a file, and the usual soft limit of 1024 exists for programs that use
    `select`.
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
    """Add the command-line flags for the configuration table `tls` to a parser."""
    add = parser.add_argument_group("certificates").add_argument
    add("--tls-cert", metavar="FILE.pem", dest="tls.cert", help=CERT_HELP)
    add("--tls-key", metavar="FILE.pem", dest="tls.key", help="Private key of --tls-cert.")
    add("--tls-ca", metavar="FILE.pem", dest="tls.ca", help=CA_HELP)


def set_openmp_spin() -> None:
    """Limit the busy-waiting of OpenMP threads to about 1 ms. Call this before torch is imported.

    Between two matrix products, the threads wait some tens of microseconds. After a forward pass,
    they would wait for 16 ms with libgomp's default (Intel Xeon), and take cores from other
    processes and from this process's event loop. Settings in the environment take precedence.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", _SPIN_COUNT)):
        os.environ[_SPIN_COUNT] = str(OMP_SPIN_COUNT)


def tune_process() -> None:
    """Tune the interpreter, the allocator and the garbage collector of a process that serves
    requests. Call this once the models are loaded."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    tune_garbage_collector()


def tune_garbage_collector() -> None:
    """Exclude the objects that exist now from garbage collection, and make full collections rare.

    Call this once models, vocabulary and modules are loaded. All requests of the process wait
    during a full collection.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_INTERVAL)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system.

    A round of 64 sessions allocates and frees megabytes of hidden states, and memory that is new
    from the system costs a page fault for every 4 KiB. Settings in the environment take precedence.
    Without glibc nothing changes.
    """
    if any(name in os.environ for name in _OWN_SETTINGS):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)
