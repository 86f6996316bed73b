"""Fault injector: injects the faults of a schedule into a fleet and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from outrider.chaos.faults import FRAME_FAULTS, Fault, FaultKind, FaultPhase, FaultRole
from outrider.chaos.frame_faults import FrameFaults
from outrider.chaos.network import NetworkDirection
from outrider_chaos.clients import ChaosClient
from outrider_chaos.fleet import InprocFleet
from outrider_chaos.killable_parts import DrafterPart, KillableVerifier, wait_until
from outrider_chaos.killable_router import RouterPart

PHASE_S = 0.6
"""Maximum seconds that a fault waits until the fleet is in the fault's phase. The fault is then
injected in any phase."""
DELAY_S = 0.03


class FaultInjector:
    """Injects the faults of one run."""

    def __init__(self, fleet: InprocFleet, readers: Sequence[ChaosClient], seed: int) -> None:
        self._fleet = fleet
        self._readers = readers
        self._rng = random.Random(seed)
        self._starting = asyncio.Lock()
        self.missed: list[Fault] = []
        """Faults that were injected outside their phase, because the fleet was not in the phase in
        time."""
        self.done: list[Fault] = []
        """Faults that were injected. A fault is not injected if its target has already ended."""

    async def run(self, faults: Sequence[Fault]) -> None:
        """Inject all faults at their times, and restart the processes that they end."""
        await asyncio.gather(*(self._one(fault) for fault in faults))

    async def _one(self, fault: Fault) -> None:
        await wait_until(lambda: self._tokens >= fault.after or self._over, timeout_s=2.0)
        if fault.phase is FaultPhase.DRAINING and fault.kind is not FaultKind.TERMINATE:
            async with self._draining():
                await self._hit(fault)
            return
        if not await wait_until(
            lambda: self._over or self._in(fault.phase), timeout_s=PHASE_S
        ) or not self._in(fault.phase):
            self.missed.append(fault)
        await self._hit(fault)

    # ---- when ----------------------------------------------------------------------------------

    @property
    def _tokens(self) -> int:
        return sum(reader.tokens for reader in self._readers)

    @property
    def _over(self) -> bool:
        return all(reader.over for reader in self._readers)

    def _in(self, phase: FaultPhase) -> bool:
        verifiers = self._fleet.verifiers
        match phase:
            case FaultPhase.PREFILL:
                return any(part.reads_prompts for part in verifiers)
            case FaultPhase.PREEMPTED:
                return any(part.preempted for part in verifiers)
            case FaultPhase.SWAPPING:
                return any(part.swapped for part in verifiers)
            case _:
                return any(part.decodes for part in verifiers)

    @asynccontextmanager
    async def _draining(self) -> AsyncGenerator[None]:
        """Context in which a verifier drains. At the end the verifier is started again."""
        part = next((part for part in self._fleet.verifiers if part.alive), None)
        if part is None:
            yield
            return
        ending = asyncio.create_task(part.terminate())
        await asyncio.sleep(0.005)
        try:
            yield
        finally:
            await ending
            await self._back(part, 0.0)

    # ---- what ----------------------------------------------------------------------------------

    async def _hit(self, fault: Fault) -> None:
        if fault.role is FaultRole.CLIENT:
            await self._hit_client(self._readers[fault.index % len(self._readers)], fault)
            return
        part = self._part(fault)
        if not part.alive:
            return
        self.done.append(fault)
        match fault.kind:
            case FaultKind.KILL:
                await part.kill()
                await self._back(part, fault.lasts_s)
            case FaultKind.TERMINATE:
                await part.terminate()
                await self._back(part, fault.lasts_s)
            case FaultKind.DEVICE_LOST if not isinstance(part, RouterPart):
                await self._lose_device(part, fault.lasts_s)
            case FaultKind.STOP | FaultKind.PARTITION | FaultKind.ONE_WAY:
                await self._block(part, fault)
            case FaultKind.CUT:
                for other in self._others(part):
                    self._fleet.network.cut_connections(part.name, other)
                if isinstance(part, RouterPart):
                    for reader in self._readers:
                        reader.door.cut()
            case FaultKind.DISK_FULL if isinstance(part, RouterPart):
                with part.disk_full():
                    await asyncio.sleep(fault.lasts_s)
            case FaultKind.DELAY:
                await self._delay(part, fault.lasts_s)
            case kind if kind in FRAME_FAULTS:
                await self._mangle(part, fault)

    async def _hit_client(self, reader: ChaosClient, fault: Fault) -> None:
        if reader.over:
            return
        self.done.append(fault)
        match fault.kind:
            case FaultKind.KILL | FaultKind.CANCEL:
                reader.leave(abruptly=fault.kind is FaultKind.KILL)
            case FaultKind.CUT:
                reader.door.cut()
            case FaultKind.SLOW:
                reader.pause()
                await asyncio.sleep(4 * fault.lasts_s)
                reader.resume()

    def _part(self, fault: Fault) -> KillableVerifier | DrafterPart | RouterPart:
        match fault.role:
            case FaultRole.VERIFIER:
                return self._fleet.verifiers[fault.index]
            case FaultRole.DRAFTER:
                return self._fleet.drafters[fault.index]
            case _:
                return self._fleet.router

    def _others(self, part: KillableVerifier | DrafterPart | RouterPart) -> list[str]:
        """Return the names of the processes at the other ends of the links that a fault of `part`
        affects."""
        match part:
            case KillableVerifier():
                return [self._fleet.router.name]
            case DrafterPart():
                return [verifier.name for verifier in self._fleet.verifiers]
            case _:
                return [drafter.name for drafter in self._fleet.drafters]

    async def _back(
        self, part: KillableVerifier | DrafterPart | RouterPart, after_s: float
    ) -> None:
        """Start the process again after `after_s` seconds, as a supervisor does, if it is not
        running."""
        await asyncio.sleep(after_s)
        async with self._starting:
            if not part.alive:
                await part.start()

    async def _lose_device(self, part: KillableVerifier | DrafterPart, after_s: float) -> None:
        part.lose_device()
        with contextlib.suppress(TimeoutError):
            # It notices with its next round or draft, if one comes.
            await asyncio.wait_for(part.lost(), 0.5)
        await part.kill()
        await self._back(part, after_s)

    async def _block(self, part: KillableVerifier | DrafterPart | RouterPart, fault: Fault) -> None:
        network, names = self._fleet.network, [one.name for one in self._fleet.parts]
        stops = fault.kind is FaultKind.STOP
        others = [name for name in names if name != part.name] if stops else self._others(part)
        ways: list[NetworkDirection] = network.directions_between(part.name, others)
        if fault.kind is FaultKind.ONE_WAY:
            ways = [network.direction(part.name, other) for other in others]
        doors = (
            [reader.door for reader in self._readers] if self._faces_clients(part, fault) else []
        )
        for way in ways:
            way.block()
        for door in doors:
            door.stall()
        await asyncio.sleep(fault.lasts_s)
        for way in ways:
            way.unblock()
        for door in doors:
            door.heal()

    @staticmethod
    def _faces_clients(part: KillableVerifier | DrafterPart | RouterPart, fault: Fault) -> bool:
        return isinstance(part, RouterPart) and fault.kind is FaultKind.STOP

    async def _delay(
        self, part: KillableVerifier | DrafterPart | RouterPart, lasts_s: float
    ) -> None:
        ways = self._fleet.network.directions_between(part.name, self._others(part))
        for way in ways:
            way.delay_s = DELAY_S
        await asyncio.sleep(2 * lasts_s)
        for way in ways:
            way.delay_s = 0.0

    async def _mangle(
        self, part: KillableVerifier | DrafterPart | RouterPart, fault: Fault
    ) -> None:
        ways = self._fleet.network.directions_between(part.name, self._others(part))
        for way in ways:
            way.mangling = FrameFaults(kind=fault.kind, share=fault.share, rng=self._rng)
        await asyncio.sleep(2 * fault.lasts_s)
        for way in ways:
            way.mangling = None
        # A transport that has lost messages ends its connection: what they said is said again.
        for other in self._others(part):
            self._fleet.network.cut_connections(part.name, other)
