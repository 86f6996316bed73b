"""Resource usage of a fleet: sessions, blocks, requests, file descriptors and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outrider.client import Client
from outrider.client.local.cluster import LocalCluster
from outrider.errors import InvalidRequestError

SETTLE_S = 20.0
"""Seconds after the end of the last request. Resources that are still held then count as leaked."""
SPARE_DESCRIPTORS = 2
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024.0


def check_proc() -> None:
    """Raise InvalidRequestError if the system has no /proc, from which usage is read."""
    if not Path("/proc/self/statm").exists():
        raise InvalidRequestError("memory and descriptors are read from /proc", reason="NO_PROC")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUsage:
    """One sample of a fleet's resource usage."""

    at_s: float
    """Monotonic time of the sample, in seconds."""
    running: int
    queued: int
    sessions: int
    used_blocks: int
    drafter_sessions: int
    rss_kb: Mapping[str, float]
    """Resident memory in KiB, by process name."""
    descriptors: Mapping[str, int]
    """Number of open file descriptors, by process name."""

    @property
    def idle(self) -> bool:
        """Whether no request holds any resource."""
        counts = self.running, self.queued, self.sessions, self.used_blocks, self.drafter_sessions
        return not any(counts)


def measure_usage(cluster: LocalCluster) -> FleetUsage:
    """Return the current usage of the fleet. Counts of requests, sessions and blocks are those that
    the router reports. It polls the other processes twice per second."""
    with Client(cluster.address) as client:
        info = client.server_info()
    pids = {process.name: process.pid for process in cluster.processes if process.pid is not None}
    return FleetUsage(
        at_s=time.monotonic(),
        running=info.running,
        queued=info.queued,
        sessions=sum(verifier.sessions for verifier in info.verifiers),
        used_blocks=sum(v.kv_total_blocks - v.kv_free_blocks for v in info.verifiers),
        drafter_sessions=sum(drafter.sessions for drafter in info.drafters),
        rss_kb={name: _rss_kb(pid) for name, pid in pids.items()},
        descriptors={name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
    )


def wait_idle(cluster: LocalCluster, *, seconds: float = SETTLE_S) -> FleetUsage:
    """Wait at most `seconds` until no request holds any resource. Return the last sample."""
    end = time.monotonic() + seconds
    while True:
        held = measure_usage(cluster)
        if held.idle or time.monotonic() > end:
            return held
        time.sleep(0.2)


@dataclass(slots=True, kw_only=True)
class UsageSeries:
    """Samples of a fleet's resource usage under load."""

    looks: list[FleetUsage] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    """Progress of the load at each sample: finished requests or elapsed minutes, as the caller
    chooses."""

    def add(self, held: FleetUsage, done: float) -> None:
        """Add a sample `held`, which was taken when the load had made the progress `done`."""
        self.looks.append(held)
        self.done.append(done)

    def slopes_kb(self) -> dict[str, float]:
        """Return how fast the memory of each process grew in the second half of the samples, by
        process name. The unit is KiB per request or per minute, whichever `done` contains."""
        half = len(self.looks) // 2
        done, looks = self.done[half:], self.looks[half:]
        if len(looks) < 2 or done[-1] == done[0]:
            return {}
        return {
            name: round(slope(done, [held.rss_kb[name] for held in looks]), 3)
            for name in looks[0].rss_kb
        }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the points (x, y)."""
    return float(np.polyfit(np.asarray(x), np.asarray(y), 1)[0])


def describe_leaks(before: FleetUsage, after: FleetUsage) -> dict[str, object]:
    """Return the resources that an idle fleet still holds in sample `after`, by name; an empty dict
    if there are none.

    A process may have SPARE_DESCRIPTORS more file descriptors than in sample `before`, because
    taking a sample needs connections.
    """
    found: dict[str, object] = {}
    for name in ("running", "queued", "sessions", "used_blocks", "drafter_sessions"):
        if getattr(after, name):
            found[name] = getattr(after, name)
    more = {
        name: count - before.descriptors[name]
        for name, count in after.descriptors.items()
        if count > before.descriptors[name] + SPARE_DESCRIPTORS
    }
    return found | ({"descriptors": more} if more else {})


def _rss_kb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_KB
