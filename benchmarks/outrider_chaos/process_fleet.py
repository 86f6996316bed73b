"""Fleet of real processes behind TCP proxies, for real signals and faults of links."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.chaos.faults import Fault, FaultKind, FaultRole
from outrider.chaos.proxy import TcpProxy
from outrider.client import AsyncClient, RetryPolicy
from outrider.client.local.child_process import ChildProcess
from outrider.errors import OutriderError

START_S = 120.0
DRAIN_S = 5
_ONCE = RetryPolicy(max_attempts=1)


class ProxiedProcess:
    """Process of a fleet, and the proxy through which other processes reach it."""

    def __init__(self, name: str, process: ChildProcess) -> None:
        self.name = name
        self.process = process
        self.link = TcpProxy(lambda: self.process.address)

    async def start(self) -> None:
        """Start the process, also after it has ended, and wait until it is ready."""
        await asyncio.to_thread(self.process.start)
        await asyncio.to_thread(self.process.wait_ready, START_S)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        while self.process.exit_status is None:
            await asyncio.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal if it runs."""
        pid = self.process.pid
        if pid is not None and self.process.exit_status is None:
            os.kill(pid, number)


class ProcessFleet:
    """Fleet of two verifiers, two drafters and a router with a journal."""

    def __init__(self, target: Path, head: Path, folder: Path, *, kv_tokens: int = 4096) -> None:
        """Create the fleet without starting it. Logs and the router's journal are written to
        `folder`. `kv_tokens` is the KV cache size of each verifier."""
        common = ["--threads", "1", "--no-shared-memory"]
        self._folder, self._target = folder, target
        self.verifiers = [
            ProxiedProcess(
                f"v{number}",
                ChildProcess(
                    f"v{number}",
                    "outrider_verifier",
                    [
                        *("--model", str(target), "--feature-head", str(head)),
                        *("--verifier-id", f"v{number}", "--kv-tokens", str(kv_tokens)),
                        *common,
                    ],
                    log_dir=folder,
                ),
            )
            for number in range(2)
        ]
        self.drafters = [
            ProxiedProcess(
                f"d{number}",
                ChildProcess(
                    f"d{number}",
                    "outrider_drafter",
                    [
                        *("--model", str(target), "--head", str(head)),
                        *("--draft-model", str(target), "--methods", "eagle3,ngram,model"),
                        *("--drafter-id", f"d{number}", *common),
                    ],
                    log_dir=folder,
                ),
            )
            for number in range(2)
        ]
        self.router: ProxiedProcess | None = None
        self._doors: list[TcpProxy] = []

    async def __aenter__(self) -> Self:
        try:
            await self._start()
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

    @property
    def members(self) -> list[ProxiedProcess]:
        """All processes of the fleet, the router last. Before the start there is no router."""
        router = [] if self.router is None else [self.router]
        return [*self.verifiers, *self.drafters, *router]

    async def door(self, seed: int) -> TcpProxy:
        """Return a proxy that leads one client to the router."""
        assert self.router is not None
        router = self.router
        proxy = TcpProxy(lambda: router.process.address, seed=seed)
        await proxy.start()
        self._doors.append(proxy)
        return proxy

    async def hit(self, fault: Fault) -> None:
        """Inject a fault and wait until it is over. A process that it ends is started again."""
        member = self._member(fault)
        match fault.kind:
            case FaultKind.KILL:
                member.signal(signal.SIGKILL)
                await self._back(member, fault.lasts_s)
            case FaultKind.TERMINATE:
                member.signal(signal.SIGTERM)
                await self._back(member, fault.lasts_s)
            case FaultKind.STOP:
                member.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.lasts_s)
                member.signal(signal.SIGCONT)
            case FaultKind.PARTITION | FaultKind.ONE_WAY:
                member.link.stall(back=fault.kind is FaultKind.PARTITION)
                await asyncio.sleep(fault.lasts_s)
                member.link.heal()
            case FaultKind.DELAY:
                member.link.delay(0.05)
                await asyncio.sleep(fault.lasts_s)
                member.link.heal()
            case FaultKind.TRUNCATE:
                member.link.truncate()
            case FaultKind.CUT:
                member.link.cut()
            case kind:
                raise ValueError(f"{kind} is not for processes")

    async def healthy(self, timeout_s: float) -> bool:
        """Wait until the router sees all processes healthy and no request runs. Return False at the
        timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._at_rest():
                    await asyncio.sleep(0.1)
                return True
        return False

    async def close(self) -> None:
        """End all processes and proxies."""
        for member in self.members:
            member.signal(signal.SIGCONT)
        await asyncio.gather(*(asyncio.to_thread(m.process.close) for m in self.members))
        for proxy in (*self._doors, *(member.link for member in self.members)):
            await proxy.close()

    async def _start(self) -> None:
        peers = [*self.verifiers, *self.drafters]
        await asyncio.gather(*(member.start() for member in peers))
        for member in peers:
            await member.link.start()
        flags = [flag for m in self.verifiers for flag in ("--verifier", m.link.address)]
        flags += [flag for m in self.drafters for flag in ("--drafter", m.link.address)]
        journal = ["--journal", str(self._folder / "journal"), "--queue-limit", "256"]
        process = ChildProcess(
            "router",
            "outrider_router",
            ["--model", str(self._target), *flags, *journal],
            log_dir=self._folder,
        )
        self.router = ProxiedProcess("router", process)
        await self.router.start()
        await self.router.link.start()
        await self.healthy(START_S)

    async def _back(self, member: ProxiedProcess, after_s: float) -> None:
        await member.ended()
        await asyncio.sleep(after_s)
        await member.start()

    async def _at_rest(self) -> bool:
        assert self.router is not None
        try:
            async with AsyncClient(self.router.process.address, retry=_ONCE) as client:
                info = await client.server_info()
        except OutriderError:
            return False
        return (
            info.running == 0
            and info.queued == 0
            and all(verifier.healthy for verifier in info.verifiers)
            and all(drafter.healthy for drafter in info.drafters)
            and all(
                v.sessions == 0 and v.kv_free_blocks == v.kv_total_blocks for v in info.verifiers
            )
            and len(info.verifiers) == len(self.verifiers)
            and all(drafter.sessions == 0 for drafter in info.drafters)
        )

    def _member(self, fault: Fault) -> ProxiedProcess:
        match fault.role:
            case FaultRole.VERIFIER:
                return self.verifiers[fault.index]
            case FaultRole.DRAFTER:
                return self.drafters[fault.index]
            case _:
                assert self.router is not None
                return self.router
