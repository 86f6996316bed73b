"""Ray cluster lifecycle: start or join Ray, and stop it within a bounded time."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import UnavailableError
from outrider_ray.config import RayFleetConfig

logger = logging.getLogger(__name__)

NICENESS = "RAY_worker_niceness"
"""Environment variable that sets the niceness of Ray's workers. With Ray's default of 15, an actor
gets only a thirtieth of a core that it shares with another busy process."""
STOP_RAY_S = 10.0
"""Seconds that Ray gets to stop by itself before its local processes are killed."""
_OBJECT_STORE_BYTES = 256 << 20
"""Size in bytes of the object store of a local Ray. It holds only large messages that are on their
way between actors."""
_PROC = Path("/proc")


@contextmanager
def ray_cluster(config: RayFleetConfig) -> Generator[None]:
    """Start a local Ray or join a Ray cluster, for the duration of a `with` block.

    Must be called on the main thread: the processes that it starts end with the thread that started
    them, so that they end even if this process is killed. Raises UnavailableError (NO_RAY).
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Avoids a warning of Ray at the start of every process about a future default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray's workers yield to other processes; here the workers serve requests.
    os.environ.setdefault(NICENESS, "0")
    import ray

    began = time.monotonic()
    try:
        ray.init(**init_options(config))
    except (RuntimeError, OSError, ValueError) as error:
        raise UnavailableError(f"Ray did not start: {error}", reason="NO_RAY") from error
    # Ray's own record factory adds a field to every record.
    logging.setLogRecordFactory(logging.LogRecord)
    seconds = round(time.monotonic() - began, 2)
    logger.info("Ray started", extra={"joined": config.ray_address, "seconds": seconds})
    try:
        yield
    finally:
        _stop_ray()


def init_options(config: RayFleetConfig) -> dict[str, Any]:
    """Return the arguments of `ray.init`."""
    options: dict[str, Any] = {
        "namespace": config.namespace,
        "log_to_driver": False,
        # Ray's records go to the same handlers as all others: JSON lines on stderr.
        "configure_logging": False,
    }
    if config.ray_address:
        return options | {"address": config.ray_address}
    most = config.max_of
    actors = sum(most)
    named = ((config.resource_of(role), float(most[role])) for role in config.roles)
    return options | {
        # Never join a Ray that happens to run on this machine.
        "address": "local",
        # Ray starts one worker per CPU in advance, and each actor uses one.
        "num_cpus": max(actors, math.ceil(actors * config.cpus_per_actor)),
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "resources": {name: count for name, count in named if name},
    }


def _stop_ray() -> None:
    import ray

    started = descendants(os.getpid())
    stopper = threading.Thread(target=ray.shutdown, name="outrider-stop-ray", daemon=True)
    stopper.start()
    stopper.join(STOP_RAY_S)
    if stopper.is_alive():
        logger.warning("Ray did not stop; its processes are killed")
    for process in started:
        process.kill()
    # Without its processes, a hanging shutdown has nothing left to wait for.
    stopper.join(STOP_RAY_S)


class LocalProcess:
    """A local process, identified by its id and start time, because ids are reused."""

    def __init__(self, pid: int) -> None:
        """Identify the process with this id. Raises OSError if there is no such process."""
        self.pid = pid
        _, self.parent, self._started = _read_stat(pid)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        try:
            state, _, started = _read_stat(self.pid)
        except OSError:
            return False
        # A dead process stays listed until its parent reaps it.
        return started == self._started and state != "Z"

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def descendants(pid: int) -> list[LocalProcess]:
    """Return all descendants of process `pid`: its children, their children and so on. Empty if
    there is no /proc."""
    children: dict[int, list[LocalProcess]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = LocalProcess(int(entry.name))
            children.setdefault(process.parent, []).append(process)
    found, parents = [], [pid]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return found


def _read_stat(pid: int) -> tuple[str, int, int]:
    """Return (state, parent's id, start time in clock ticks since boot) of a process."""
    # The second field is the program's name in parentheses, which may contain any character.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])
