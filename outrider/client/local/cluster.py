"""Local cluster: starts router, verifiers and drafters on this machine, and stops them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.client.local.child_process import (
    NOT_READY,
    STOP_TIMEOUT_S,
    ChildProcess,
    check_running,
)
from outrider.client.local.config import SEPARATE, LocalFleetConfig
from outrider.client.local.preflight import check_files
from outrider.client.local.process_flags import (
    ProcessPlacement,
    count_gpus,
    drafter_args,
    plan_placement,
    router_args,
    verifier_args,
)
from outrider.client.local.readiness import check_hosts, check_ports_free, wait_healthy
from outrider.client.local.settings_check import check_settings
from outrider.errors import UnavailableError
from outrider.transport.tls import CertificateRole

POLL_INTERVAL_S = 1.0
DRAIN_POLL_INTERVAL_S = 0.05
START_TIMEOUT_S = 600.0
"""Maximum time, in seconds, that a process may take to start, including loading its model."""


def print_progress(line: str) -> None:
    """Write a progress line to stderr. If stderr is closed, nothing is written."""
    try:
        sys.stderr.write(f"[outrider] {line}\n")
        sys.stderr.flush()
    except OSError:
        # The terminal or pipe was closed, which is no reason to stop serving.
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


class _StoppedError(Exception):
    """Raised to end `LocalCluster.start` when `stop` is set after a router was launched."""


class LocalCluster:
    """The processes of a local fleet. As a context manager, it starts and stops them."""

    def __init__(
        self,
        config: LocalFleetConfig,
        *,
        progress: Callable[[str], None] = print_progress,
        stop: threading.Event | None = None,
    ) -> None:
        """Create a cluster without starting it.

        `progress` is called with each progress line. If `stop` is set after a router was launched,
        `start` returns early; the processes keep running until `drain` or `close`.
        """
        self._config = config
        self._progress = progress
        self._stop = stop or threading.Event()
        self._logs: Path | None = None
        self._own_logs: Path | None = None
        self.members: dict[CertificateRole, list[ChildProcess]] = {}
        """Processes that were started so far, by role: verifiers, drafters and routers."""

    @property
    def address(self) -> str:
        """Address of the routers."""
        assert CertificateRole.ROUTER in self.members, "the cluster is not started"
        return self.members[CertificateRole.ROUTER][0].address

    @property
    def processes(self) -> tuple[ChildProcess, ...]:
        """Processes that were started so far; routers come first."""
        return tuple(each for role in reversed(self.members) for each in self.members[role])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> str:
        """Start all processes, wait until requests can be served, and return the router's address.
        If `stop` is set after a router was launched, return early; the processes keep running for
        `drain`.

        Raises UnavailableError, with the process's failure reason or the end of its log, if a
        process does not start. Raises FailedPreconditionError (WRONG_HOST) if the router's
        certificate does not name its host, and the errors of `check_files` for files that cannot be
        served.
        """
        try:
            return self._start()
        except _StoppedError:
            return self._config.listen
        except BaseException:
            self.close()
            raise

    def drain(self, enough: threading.Event, look: Callable[[], None]) -> None:
        """Stop the routers gracefully. They refuse new requests and end when the running requests
        have finished, or after `drain_timeout_s`.

        If `enough` is set meanwhile, the running requests are ended immediately. Verifiers and
        drafters keep running, because the requests need them. `look` is called repeatedly, so that
        they are still supervised.
        """
        routers = self.members[CertificateRole.ROUTER]
        for router in routers:
            router.request_stop()
        end = time.monotonic() + self._config.drain_timeout_s + STOP_TIMEOUT_S
        while (
            _running(routers) and time.monotonic() < end and not enough.wait(DRAIN_POLL_INTERVAL_S)
        ):
            look()
        for router in routers:
            router.request_stop()
        end = time.monotonic() + STOP_TIMEOUT_S
        while _running(routers) and time.monotonic() < end:
            time.sleep(DRAIN_POLL_INTERVAL_S)

    def close(self) -> None:
        """Stop all processes, even while requests run; idempotent."""
        for process in self.processes:
            process.close()
        if self._own_logs is not None:
            shutil.rmtree(self._own_logs, ignore_errors=True)
            self._own_logs = None

    def _start(self) -> str:
        config = self._config
        # Check here first: the processes would report these errors one by one while loading.
        if config.tls_dir is not None:
            check_hosts(config.tls_dir, filter(None, (config.listen, config.http)))
        verifying, drafting = plan_placement(config, count_gpus() if config.uses_gpus else 0)
        settings = check_settings(config, verifying, drafting)
        for line in settings.warnings:
            self._progress(line)
        check_ports_free(*settings.addresses)
        for line in check_files(config):
            self._progress(line)
        self._logs = self._log_dir()
        verifiers, drafters = self._start_peers(verifying, drafting)
        several = config.routers > 1
        self._progress(f"starting {config.routers} routers" if several else "starting the router")
        address = config.listen
        for index in range(config.routers):
            name = f"router-{index}" if several else "router"
            args = router_args(config, verifiers, drafters, index)
            # If the first router chose a free port, the other routers use the same port.
            (router,) = self._launch(CertificateRole.ROUTER, {name: args}, address)
            address = self._ready(router)
            self._check_stop()
        wait_healthy(
            address,
            self.processes,
            tls_dir=config.tls_dir,
            timeout_s=START_TIMEOUT_S,
            progress=self._progress,
            stop=self._stop,
        )
        self._check_stop()
        self._progress(f"ready on {address}")
        told = self.members[CertificateRole.ROUTER][0].ready
        if "http" in told:
            self._progress(f"OpenAI's API on http://{told['http']}/v1")
        return address

    def _ready(self, process: ChildProcess) -> str:
        """Wait until a process is ready, and return its address.

        Raises UnavailableError if the process is not ready within START_TIMEOUT_S, or if any
        process of the cluster ends meanwhile.
        """
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return process.wait_ready(POLL_INTERVAL_S)
            except UnavailableError as error:
                if error.reason != NOT_READY:
                    raise
            self._check_stop()
            check_running(self.processes)
            if time.monotonic() > end:
                raise UnavailableError(
                    f"{process.name} was not ready after {START_TIMEOUT_S:g} s{process.log_tail()}",
                    reason=NOT_READY,
                )

    def _check_stop(self) -> None:
        if self._stop.is_set() and CertificateRole.ROUTER in self.members:
            raise _StoppedError

    def _start_peers(
        self, verifying: Sequence[ProcessPlacement], drafting: Sequence[ProcessPlacement]
    ) -> tuple[list[str], list[str]]:
        """Start verifiers and drafters at the same time, and return the addresses of the verifiers
        and those of the drafters."""
        config = self._config
        name = config.model_name or config.model.name
        where = "" if config.placement == SEPARATE else f", {config.placement} drafting"
        self._progress(
            f"starting {_counted(verifying, 'verifier')}: {name}, {config.element_type} on "
            f"{config.device}{where}"
        )
        if config.simulated_acceptance:
            self._progress(f"SIMULATED ACCEPTANCE {config.simulated_acceptance}: no real text")
        verifiers = self._launch(
            CertificateRole.VERIFIER,
            {place.name: verifier_args(config, place) for place in verifying},
        )
        if drafting:
            methods = ", ".join(config.drafter_methods)
            self._progress(f"starting {_counted(drafting, 'drafter')}: {methods}")
        drafters = self._launch(
            CertificateRole.DRAFTER, {place.name: drafter_args(config, place) for place in drafting}
        )
        return (
            [self._ready(process) for process in verifiers],
            [self._ready(process) for process in drafters],
        )

    def _launch(
        self, role: CertificateRole, args: Mapping[str, Sequence[str]], listen: str = "127.0.0.1:0"
    ) -> list[ChildProcess]:
        """Start one process of this role for each entry of `args`, which maps process names to
        command-line arguments."""
        processes = [
            ChildProcess(name, f"outrider_{role}", each, listen=listen, log_dir=self._logs)
            for name, each in args.items()
        ]
        self.members[role] = self.members.get(role, []) + processes
        for process in processes:
            process.start()
        return processes

    def _log_dir(self) -> Path | None:
        if self._config.inherit_logs:
            return None
        if self._config.log_dir is not None:
            self._config.log_dir.mkdir(parents=True, exist_ok=True)
            return self._config.log_dir
        self._own_logs = Path(tempfile.mkdtemp(prefix="outrider-"))
        return self._own_logs


def _running(processes: Sequence[ChildProcess]) -> bool:
    return any(process.exit_status is None for process in processes)


def _counted(places: Sequence[ProcessPlacement], kind: str) -> str:
    return f"the {kind}" if len(places) == 1 else f"{len(places)} {kind}s"
