"""Load and faults against a running fleet of local processes, given by their ids.

It cannot reach processes on other hosts or links: use the tools of the platform there.
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
"""Within this everybody is healthy again and nothing is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """Load and faults applied to one fleet."""

    router: str
    targets: tuple[FaultTarget, ...]
    kinds: tuple[FaultKind, ...]
    duration_s: float
    every_s: float
    """Between two faults."""
    clients: int
    max_tokens: int
    seed: int


def run_live(siege: LiveRun) -> int:
    """Run a siege and print what it has shown; the exit status. Raises OutriderError."""
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
    """What is still held, or ill, a while after the last client has gone."""
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
