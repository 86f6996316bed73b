"""Node keeper: rejoins a Ray node to its cluster after it was declared dead.

When a cluster has declared a node dead, for instance after a network partition or a pause of the
machine, the node's raylet exits and must be restarted. On Kubernetes the kubelet restarts it;
elsewhere this module does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from outrider_ray.actor_keeper import MIN_BACKOFF_S, next_pause
from outrider_ray.cluster import NICENESS

logger = logging.getLogger(__name__)

STOP_S = 40.0
"""Seconds that a node gets to end before it is killed. This is longer than Ray's own draining,
which takes up to 30 s."""
_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")


def keep_node(arguments: Sequence[str]) -> int:
    """Run `ray start --block ARGUMENTS` and restart it whenever it ends, until SIGTERM or SIGINT.
    Returns exit status 0."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    os.environ.setdefault(NICENESS, "0")
    pause_s = MIN_BACKOFF_S / 2.0
    while not stop.is_set():
        began = time.monotonic()
        status = _run_node([*_START, *arguments], stop)
        if stop.is_set():
            break
        pause_s = next_pause(pause_s, time.monotonic() - began)
        logger.warning(
            "Ray node exited; it is restarted", extra={"status": status, "in_s": pause_s}
        )
        stop.wait(pause_s)
    return 0


def _run_node(command: Sequence[str], stop: threading.Event) -> int | None:
    """Run a node and return its exit status, or None if it was stopped. All its processes are
    killed at the end."""
    # In a session of its own, the node and all its children can be killed as a group.
    with subprocess.Popen(command, start_new_session=True, stdout=sys.stderr) as node:
        logger.info("Ray node started", extra={"pid": node.pid})
        try:
            while not stop.wait(0.2):
                if (status := node.poll()) is not None:
                    return status
            node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(STOP_S)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
