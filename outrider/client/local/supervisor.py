"""Supervises the local processes: restarts those that end, fall silent or stop serving."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from outrider.client.local.child_process import ChildProcess
from outrider.client.local.config import HEALTH_TIMEOUT_S
from outrider.client.local.health_probe import HealthProbe, HealthRecord
from outrider.transport.tls import CertificateRole

MIN_BACKOFF_S = 0.5
MAX_PAUSE_S = 30.0
MIN_STABLE_S = 60.0
"""Time, in seconds, that a process must run to count as stable. If a stable process ends, the pause
before its restart is the shortest one."""
MAX_START_S = 600.0
"""Maximum time, in seconds, that a restarted process may take to load its model and serve."""
_ALIVE = "grpc.health.v1.Health"
"""Name in the health service whose status is SERVING in any process that runs. It is used for
routers, because a router that has no verifier does not serve, but needs no restart."""

Progress = Callable[[str], None]


class ChildSupervisor:
    """Supervises one process: kills it if it does not answer health probes, and restarts it after
    it has ended. The pause before a restart grows if the process ends again soon."""

    def __init__(
        self,
        process: ChildProcess,
        progress: Progress,
        *,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
        service: str = "",
    ) -> None:
        """Create a supervisor. `health_timeout_s` is the time, in seconds, without an answer to
        health probes after which the process is killed; 0 disables the probes. `service` is the
        name in the health service to ask for."""
        self._process = process
        self._progress = progress
        self._health_timeout_s = health_timeout_s
        self._service = service
        self._pause_s = MIN_BACKOFF_S
        self._started = time.monotonic()
        self._restart_at: float | None = None
        self._probe: HealthProbe | None = None
        self._record = HealthRecord(health_timeout_s, self._started)

    def check_child(self, now: float) -> None:
        """Kill the process if it is unhealthy, and restart it if it has ended and the pause is
        over. `now` is the time of the monotonic clock in seconds."""
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._restart(now)
            return
        status = self._process.exit_status
        if status is not None:
            self._plan_restart(f"ended with status {status}", now)
        elif complaint := self._complaint(now):
            self._process.kill()
            self._plan_restart(f"{complaint} and was killed", now)

    def close(self) -> None:
        """End the supervision. The process continues to run."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _plan_restart(self, why: str, now: float) -> None:
        self.close()
        if now - self._started > MIN_STABLE_S:
            self._pause_s = MIN_BACKOFF_S
        self._progress(f"{self._process.name} {why}; starting it again")
        self._restart_at = now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)

    def _restart(self, now: float) -> None:
        self._started = now
        try:
            self._process.start()
        except (OSError, RuntimeError) as error:
            # The system is out of memory, descriptors or threads; try again later.
            self._plan_restart(f"could not be started: {error}", now)
            return
        self._restart_at = None

    def _complaint(self, now: float) -> str:
        """Return why the running process must be killed; "" if it need not be killed."""
        if not self._health_timeout_s:
            return ""
        if self._probe is None:
            ready = self._process.ready
            if not ready:
                late = now - self._started > MAX_START_S
                return f"was not ready after {MAX_START_S:g} s" if late else ""
            if "health" not in ready:
                return ""
            self._probe = HealthProbe(ready["health"], self._service)
            self._record = HealthRecord(self._health_timeout_s, now)
        self._record.record_probe(self._probe.poll(now), now)
        return self._record.restart_reason(now)


class Supervisor:
    """Supervises all processes of a fleet. It is a context manager; its end ends the
    supervision."""

    def __init__(
        self,
        members: Mapping[CertificateRole, Sequence[ChildProcess]],
        progress: Progress,
        *,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> None:
        """Supervise the processes in `members`, which are grouped by role. `health_timeout_s` is
        that of `ChildSupervisor`."""
        self._keepers = {
            process: ChildSupervisor(
                process,
                progress,
                health_timeout_s=health_timeout_s,
                service=_ALIVE if role is CertificateRole.ROUTER else "",
            )
            for role, processes in members.items()
            for process in processes
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release(list(self._keepers))

    def look(self) -> None:
        """Check every process once. Does not wait for processes that are unhealthy or
        restarting."""
        for keeper in self._keepers.values():
            keeper.check_child(time.monotonic())

    def release(self, processes: Iterable[ChildProcess]) -> None:
        """End the supervision of these processes. They continue to run."""
        for process in processes:
            self._keepers.pop(process).close()
