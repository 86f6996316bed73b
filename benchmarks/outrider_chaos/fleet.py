"""Fleet in one process, whose clients connect through TCP proxies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.chaos.network import CONTROL_S, ChaosNetwork
from outrider.chaos.proxy import TcpProxy
from outrider.chaos.schedule import FleetShape
from outrider.transport.heartbeat import HeartbeatConfig
from outrider_chaos.killable_parts import ChaosModels, DrafterPart, KillableVerifier, wait_until
from outrider_chaos.killable_router import RouterPart

READY_S = 30.0
BEAT_S, SILENCE_S = 0.1, 0.5


class InprocFleet:
    """Verifiers, drafters and a router that run in this process and are connected by a simulated
    network."""

    def __init__(self, shape: FleetShape, models: ChaosModels, folder: Path) -> None:
        """Create the processes of the fleet without starting them. The router writes its journal in
        `folder`."""
        self._slowness = models.slowness
        self.network = ChaosNetwork(
            heartbeat=HeartbeatConfig(
                interval_s=BEAT_S * models.slowness, timeout_s=SILENCE_S * models.slowness
            ),
            control_s=CONTROL_S * models.slowness,
        )
        self.verifiers = [
            KillableVerifier(f"v{n}", shape, models, self.network) for n in range(shape.verifiers)
        ]
        self.drafters = [
            DrafterPart(f"d{n}", shape, models, self.network) for n in range(shape.drafters)
        ]
        self.router = RouterPart(
            "router",
            models,
            self.network,
            folder,
            verifiers=tuple(part.name for part in self.verifiers),
            drafters=tuple(part.name for part in self.drafters),
        )
        self._proxies: list[TcpProxy] = []

    @property
    def parts(self) -> list[KillableVerifier | DrafterPart | RouterPart]:
        """All processes of the fleet, the router last."""
        return [*self.verifiers, *self.drafters, self.router]

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(part.start() for part in self.parts))
            await self.healthy()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def healthy(self) -> bool:
        """Wait until the router sees all processes healthy. Return False if this takes longer than
        READY_S, times the slowness of the models."""
        return await wait_until(self.router.ready, timeout_s=READY_S * self._slowness)

    async def door(self, seed: int) -> TcpProxy:
        """Return a proxy that leads one client to the router. It finds the router's address again
        after a restart of the router."""
        proxy = TcpProxy(lambda: self.router.address, seed=seed)
        await proxy.start()
        self._proxies.append(proxy)
        return proxy

    async def held(self) -> list[str]:
        """Return descriptions of the resources that processes still hold. Call this while there are
        no requests."""
        found = [await part.held() for part in self.parts]
        return [line for lines in found for line in lines]

    async def close(self) -> None:
        """End all processes, proxies and the network."""
        for proxy in self._proxies:
            await proxy.close()
        await asyncio.gather(*(part.kill() for part in self.parts))
        await self.network.close()
