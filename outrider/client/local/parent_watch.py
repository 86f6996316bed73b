"""Runs a module as a child process that ends with its parent.

Usage: `python -m outrider.client.local.parent_watch MODULE ...`. On Linux the kernel kills this
process with the thread that started it, even if it is stopped or hangs. Elsewhere a thread reads
stdin, whose other end the parent holds: when that ends, this process is asked to stop (SIGTERM)
and, if it does not, killed. The parent reads stdout, where the reason is written if the module
fails.
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
"""Time between being asked to stop and being killed."""
_STDIN = 0
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


def _die_with_parent() -> None:
    """Have the kernel kill this process with the thread that started it, where it can (Linux)."""
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
    """Run the module argv[0] with the arguments that follow it."""
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
