"""Runs a module as a child process that ends with its parent.

Usage: `python -m outrider.client.local.parent_watch MODULE ...`. On Linux the kernel kills this
process when the thread that started it ends, even if this process is stopped or hangs. On all
systems, a thread also reads stdin, which is a pipe from the parent. When the pipe is closed, the
thread sends SIGTERM to this process and, after a grace time, SIGKILL. If the module fails, the
reason is written to stdout, which the parent reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence

from outrider.failure_event import add_supervisor, write_failure

GRACE_S = 3.0
"""Grace time between SIGTERM and SIGKILL, in seconds."""
_STDIN = 0
_PR_SET_PDEATHSIG = 1
"""Number of the prctl option PR_SET_PDEATHSIG, as in linux/prctl.h."""


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _watch_parent() -> None:
    try:
        while os.read(_STDIN, 4096):
            pass
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: Sequence[str]) -> None:
    """Run the module `argv[0]` with the arguments `argv[1:]`."""
    _die_with_parent()
    threading.Thread(target=_watch_parent, name="outrider-watch-parent", daemon=True).start()
    add_supervisor(sys.stdout)
    sys.argv[:] = list(argv)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            write_failure(sys.stdout, ending.code)
        raise
    except Exception as error:
        write_failure(sys.stdout, f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
