"""Fault schedule: faults, requests and fleet drawn from a seed, the only source of randomness."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from outrider.chaos.faults import (
    CELLS,
    FAULTS_BY_ROLE,
    FRAME_FAULTS,
    Fault,
    FaultKind,
    FaultPhase,
    FaultRole,
)
from outrider.chaos.requests import ChaosRequest, draw_requests, priority_request

MAX_FAULTS = 3
_STRIDE = 61
"""Step in `CELLS` from the first fault of one seed to that of the next, so that consecutive seeds
hit different roles. It is coprime to the number of cells, so that all cells are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """Number of processes in the fleet of a run, and their settings."""

    verifiers: int = 1
    drafters: int = 1
    kv_tokens: int = 4096
    """KV cache size of each verifier, in tokens. A small size causes preemption."""
    shm_channels: bool = False
    """Whether drafters use shared-memory channels. Frame faults cannot be injected into these."""
    planner: str = "fixed"
    preemption: str = "auto"
    """How preempted sessions recover their KV cache: auto, swap or recompute."""

    def count(self, role: FaultRole, clients: int) -> int:
        """Return the number of processes of a role; for the role of clients, return `clients`."""
        counts = {
            FaultRole.DRAFTER: self.drafters,
            FaultRole.VERIFIER: self.verifiers,
            FaultRole.ROUTER: 1,
        }
        return counts.get(role, clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSchedule:
    """Faults, requests and fleet of one run."""

    seed: int
    fleet: FleetShape
    asks: tuple[ChaosRequest, ...]
    faults: tuple[Fault, ...]

    @classmethod
    def from_seed(cls, seed: int) -> Self:
        """Create the schedule of a seed.

        The first faults of consecutive seeds are different entries of `CELLS`, until all entries
        have been used.
        """
        rng = random.Random(f"outrider-chaos-{seed}")
        kind, role, phase = CELLS[seed * _STRIDE % len(CELLS)]
        tight = phase in (FaultPhase.PREEMPTED, FaultPhase.SWAPPING) or rng.random() < 0.3
        asks = draw_requests(rng, rng.randint(4, 5) if tight else rng.randint(3, 5))
        asks += (priority_request(rng),) * tight
        shape = FleetShape(
            verifiers=rng.choice((1, 2)),
            drafters=rng.choice((1, 2)),
            kv_tokens=rng.choice((320, 352, 384)) if tight else 4096,
            planner=rng.choice(("fixed", "fixed", "automatic")),
            preemption="swap"
            if phase is FaultPhase.SWAPPING
            else rng.choice(("auto", "swap", "recompute")),
        )
        cells = [(kind, role, phase)]
        cells += [rng.choice(CELLS) for _ in range(rng.randint(0, MAX_FAULTS - 1))]
        faults = tuple(_fault(rng, *cell, shape, len(asks)) for cell in cells)
        mangled = any(fault.kind in FRAME_FAULTS for fault in faults)
        shape = replace(shape, shm_channels=not mangled and rng.random() < 0.4)
        return cls(seed=seed, fleet=shape, asks=asks, faults=faults)

    def without(self, index: int) -> FaultSchedule:
        """Return this schedule without the fault number `index`."""
        kept = self.faults[:index] + self.faults[index + 1 :]
        return replace(self, faults=kept)

    def without_ask(self, index: int) -> FaultSchedule:
        """Return this schedule without the request number `index` and the faults of its client."""
        faults = tuple(
            replace(fault, index=fault.index - (fault.index > index))
            if fault.role is FaultRole.CLIENT
            else fault
            for fault in self.faults
            if fault.role is not FaultRole.CLIENT or fault.index != index
        )
        return replace(self, asks=self.asks[:index] + self.asks[index + 1 :], faults=faults)

    def __str__(self) -> str:
        shape = self.fleet
        lines = [
            f"seed {self.seed}: {shape.verifiers} verifiers of {shape.kv_tokens} tokens of KV, "
            f"{shape.drafters} drafters{' over shared memory' * shape.shm_channels}, "
            f"{shape.planner} planner, KV back by {shape.preemption}",
            *(f"  request {number}: {ask}" for number, ask in enumerate(self.asks)),
            *(f"  fault {number}: {fault}" for number, fault in enumerate(self.faults)),
        ]
        return "\n".join(lines)


def _fault(
    rng: random.Random,
    kind: FaultKind,
    role: FaultRole,
    phase: FaultPhase,
    shape: FleetShape,
    clients: int,
) -> Fault:
    assert kind in FAULTS_BY_ROLE[role]
    early = phase is not FaultPhase.ROUND and rng.random() < 0.8
    lasts = rng.choice((0.02, 0.06, 0.15))
    if kind is FaultKind.STOP:
        # Some are over before anybody notices, some last beyond every heartbeat.
        lasts = rng.choice((0.05, 0.2, 0.9))
    return Fault(
        kind=kind,
        role=role,
        index=rng.randrange(shape.count(role, clients)),
        phase=phase,
        # Prompts are read, and memory runs out, before most tokens come.
        after=0 if early else rng.choice((1, rng.randint(2, 30), rng.randint(10, 120))),
        lasts_s=lasts,
        share=rng.choice((0.1, 0.5)) if kind in FRAME_FAULTS else 0.0,
    )
