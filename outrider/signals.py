"""Signals that make a process drain and exit: SIGTERM, SIGINT and SIGHUP."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM and SIGINT, and SIGHUP unless this process ignores it (as under `nohup`)."""
    asked = (signal.SIGTERM, signal.SIGINT)
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (*asked, signal.SIGHUP) if hangs_up else asked
