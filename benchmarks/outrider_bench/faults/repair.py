"""Repair of a fleet after faults: restart of processes, and waits until the router sees them
again."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from outrider.client import Client, OutriderError, RetryPolicy
from outrider.client.local.child_process import ChildProcess
from outrider.client.local.cluster import START_TIMEOUT_S, LocalCluster
from outrider.client.local.config import LocalFleetConfig
from outrider.errors import UnavailableError
from outrider.transport.tls import CertificateRole
from outrider.wire.inference import ServerInfo
from outrider_bench.report import print_progress


@contextmanager
def spare_fleet_config(config: LocalFleetConfig, drafters: int = 2) -> Iterator[LocalCluster]:
    """Start two verifiers, `drafters` drafters and a router with a journal, with the other settings
    of `config`. Yield the fleet once it is idle, and stop it at the end. Raises UnavailableError if
    it does not become idle."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        journal = Path(directory) / "journal"
        config = replace(config, verifiers=2, drafters=drafters, journal=journal)
        with LocalCluster(config, progress=print_progress) as fleet:
            wait_idle(fleet)
            yield fleet


def repair_fleet(fleet: LocalCluster, process: ChildProcess) -> None:
    """Continue the process if it is stopped, or start it again if it has ended. Then wait until the
    fleet is idle."""
    if restart_process(process):
        process.wait_ready(START_TIMEOUT_S)
    wait_idle(fleet)


def restart_process(process: ChildProcess) -> bool:
    """Continue the process if it is stopped, or start it again if it has ended. Return True if it
    was started again; it may not be ready yet."""
    if process.pid is not None and process.exit_status is None:
        os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.1)
    if process.exit_status is None:
        return False
    process.start()
    return True


def wait_drafters(fleet: LocalCluster, wanted: ChildProcess) -> None:
    """Wait until no session runs, and `wanted` and at least one other drafter are connected to all
    verifiers. Further drafters may still be starting. Raises UnavailableError at a timeout."""
    wanted.wait_ready(START_TIMEOUT_S)

    def has_drafters(info: ServerInfo) -> bool:
        linked = {
            drafter.address
            for drafter in info.drafters
            if drafter.healthy and len(drafter.links) == len(info.verifiers)
        }
        busy = any(verifier.sessions for verifier in info.verifiers)
        return not busy and wanted.address in linked and len(linked) > 1

    _wait(fleet, has_drafters)


def wait_idle(fleet: LocalCluster) -> None:
    """Wait until the router sees all processes and no session runs. Raises UnavailableError at a
    timeout."""
    _wait(fleet, lambda info: _serves(fleet, info) and not any(v.sessions for v in info.verifiers))


def wait_serving(fleet: LocalCluster) -> None:
    """Wait until the router sees all processes, whether or not sessions run. Raises
    UnavailableError at a timeout."""
    _wait(fleet, lambda info: _serves(fleet, info))


def poll_until(is_met: Callable[[], bool], *, every_s: float = 0.02) -> bool:
    """Call `is_met` every `every_s` seconds until it returns True. Return False if it has not
    within START_TIMEOUT_S."""
    end = time.monotonic() + START_TIMEOUT_S
    while not is_met():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


def _wait(fleet: LocalCluster, is_met: Callable[[ServerInfo], bool]) -> None:
    with Client(fleet.address, timeout_s=5.0, retry=RetryPolicy(max_attempts=1)) as client:
        if not poll_until(lambda: _asked(client, is_met), every_s=0.05):
            raise UnavailableError("the fleet is not healthy", reason="NOT_HEALTHY")


def _asked(client: Client, is_met: Callable[[ServerInfo], bool]) -> bool:
    try:
        return is_met(client.server_info())
    except OutriderError:
        return False


def _serves(fleet: LocalCluster, info: ServerInfo) -> bool:
    links = sum(len(drafter.links) for drafter in info.drafters)
    return (
        len(info.verifiers) == len(fleet.members[CertificateRole.VERIFIER])
        and len(info.drafters) == len(fleet.members[CertificateRole.DRAFTER])
        and all(verifier.healthy and not verifier.draining for verifier in info.verifiers)
        and all(drafter.healthy for drafter in info.drafters)
        and links == len(info.verifiers) * len(info.drafters)
    )
