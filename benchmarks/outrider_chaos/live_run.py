"""Load and faults for a running fleet of local processes, which are given by their process ids.

Faults cannot be injected into links or into processes of other hosts. Use the tools of the platform
for these.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass

from outrider.chaos.checker import CheckViolation
from outrider.chaos.faults import FaultKind
from outrider.chaos.load import ChaosLoad
from outrider.chaos.report import describe
from outrider.chaos.signals import FaultTarget, inject_fault, pick_fault
from outrider.client import AsyncClient
from outrider.errors import OutriderError

SETTLE_S = 30.0
"""Seconds after the load in which all processes must become healthy and release all resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """Settings of one run: the router, the processes to inject faults into, and the load."""

    router: str
    targets: tuple[FaultTarget, ...]
    kinds: tuple[FaultKind, ...]
    duration_s: float
    every_s: float
    """Seconds between two faults."""
    clients: int
    max_tokens: int
    seed: int


def run_live(siege: LiveRun) -> int:
    """Send requests to a router, inject faults and print a report. Return the exit status: 1 if a
    guarantee was violated, else 0. Raises OutriderError."""
    return asyncio.run(_run(siege))


async def _run(siege: LiveRun) -> int:
    load = ChaosLoad(siege.router, siege.max_tokens, timeout_s=max(60.0, siege.duration_s))
    await load.record_baseline()
    faults: list[str] = []
    until = time.monotonic() + siege.duration_s
    storm = asyncio.create_task(_storm(siege, until, faults))
    try:
        await load.run_clients(siege.clients, until, siege.seed)
    finally:
        await storm
    violations = load.violations + await _settle(siege.router)
    sys.stdout.write(describe(load.histories, violations, faults) + "\n")
    return int(bool(violations))


async def _storm(siege: LiveRun, until: float, faults: list[str]) -> None:
    rng, began = random.Random(siege.seed), time.monotonic()
    while time.monotonic() + siege.every_s < until:
        await asyncio.sleep(siege.every_s)
        chosen = pick_fault(list(siege.targets), siege.kinds, rng)
        if chosen is None:
            return
        kind, target = chosen
        lasts_s = rng.uniform(0.1, siege.every_s / 2)
        faults.append(f"{time.monotonic() - began:6.1f} s: {kind} {target}")
        await inject_fault(kind, target, lasts_s)


async def _settle(router: str) -> list[CheckViolation]:
    """Return a violation for each resource that is still held, and for each unhealthy process,
    SETTLE_S seconds after the last request."""
    end, held = time.monotonic() + SETTLE_S, ["no answer"]
    while held and time.monotonic() < end:
        held = await _held(router)
        await asyncio.sleep(0.2 if held else 0.0)
    return [CheckViolation(promise="leak", detail=line) for line in held]


async def _held(router: str) -> list[str]:
    try:
        async with AsyncClient(router, timeout_s=5.0) as client:
            info = await client.server_info()
    except OutriderError as error:
        return [f"the router does not answer: {error.message}"]
    found = [f"{info.running} requests run"] if info.running else []
    for verifier in info.verifiers:
        blocks = verifier.kv_total_blocks - verifier.kv_free_blocks
        if not verifier.healthy:
            found.append(f"{verifier.address} is not healthy")
        elif verifier.sessions or blocks:
            found.append(f"{verifier.address} holds {verifier.sessions} sessions, {blocks} blocks")
    found += [f"{d.address} is not healthy" for d in info.drafters if not d.healthy]
    return found
