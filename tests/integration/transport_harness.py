"""What the contract suite needs of a transport: fake endpoints somewhere, and ways to hurt them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Protocol

from outrider.transport.grpc import (
    GrpcConfig,
    GrpcDialer,
    GrpcServer,
    drafter_services,
    verifier_services,
)
from outrider.transport.heartbeat import HeartbeatConfig, HeartbeatConnection
from outrider.transport.in_process import InprocNetwork
from outrider.transport.interface import Dialer, VerifierConnection
from tests.integration.fake_endpoints import FakeDrafter, FakeVerifier

HEARTBEAT = HeartbeatConfig(interval_s=0.2, timeout_s=1.5)


class Harness(Protocol):
    """One transport under test."""

    dialer: Dialer
    separate: bool
    """Whether mortal verifiers are processes of their own."""

    async def verifier(self) -> str:
        """Serve a FakeVerifier; its address."""
        ...

    async def drafter(self) -> str:
        """Serve a FakeDrafter; its address."""
        ...

    async def mortal_verifier(self) -> str:
        """Serve a FakeVerifier that may be killed or frozen."""
        ...

    async def kill(self, address: str) -> None:
        """End a mortal verifier without a word."""
        ...

    async def freeze(self, address: str) -> None:
        """Stop a mortal verifier in its tracks; its sockets stay open."""
        ...

    async def close(self) -> None:
        """End everything."""
        ...


class _Freezable(FakeVerifier):
    """Goes silent on demand; it never speaks of its own accord."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: list[VerifierConnection] = []

    async def exchange(self, connection: VerifierConnection) -> None:
        self.connections.append(connection)
        await super().exchange(connection)


class InprocHarness:
    """Endpoints in this event loop."""

    separate = False

    def __init__(self) -> None:
        self._freezable: dict[str, _Freezable] = {}
        self.network = InprocNetwork(heartbeat=HEARTBEAT)
        self.dialer: Dialer = self.network.dialer()
        self._addresses: list[str] = []

    def _address(self) -> str:
        self._addresses.append(f"inproc:{len(self._addresses)}")
        return self._addresses[-1]

    async def verifier(self) -> str:
        address = self._address()
        self.network.serve_verifier(address, FakeVerifier())
        return address

    async def drafter(self) -> str:
        address = self._address()
        self.network.serve_drafter(address, FakeDrafter())
        return address

    async def mortal_verifier(self) -> str:
        address = self._address()
        self._freezable[address] = _Freezable()
        self.network.serve_verifier(address, self._freezable[address])
        return address

    async def kill(self, address: str) -> None:
        await self.network.remove(address)

    async def freeze(self, address: str) -> None:
        for connection in self._freezable[address].connections:
            assert isinstance(connection, HeartbeatConnection)
            connection.stop_heartbeats()

    async def close(self) -> None:
        for address in self._addresses:
            await self.network.remove(address)


class GrpcHarness:
    """Servers in this process; mortal ones in processes of their own."""

    separate = True

    def __init__(self, *, shm_channels: bool = False) -> None:
        self._config = GrpcConfig(heartbeat=HEARTBEAT, shm_channels=shm_channels)
        self.dialer: Dialer = GrpcDialer(self._config)
        self._servers: list[GrpcServer] = []
        self._processes: dict[str, Process] = {}

    async def verifier(self) -> str:
        services = verifier_services(FakeVerifier(), self._config)
        return await self._serve(GrpcServer("127.0.0.1:0", services, config=self._config))

    async def drafter(self) -> str:
        services = drafter_services(FakeDrafter())
        return await self._serve(GrpcServer("127.0.0.1:0", services, config=self._config))

    async def _serve(self, server: GrpcServer) -> str:
        self._servers.append(server)
        return await server.start()

    async def mortal_verifier(self) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.fake_process",
            str(HEARTBEAT.interval_s),
            str(HEARTBEAT.timeout_s),
            *(["shm"] if self._config.shm_channels else []),
            stdout=PIPE,
        )
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        self._processes[address] = process
        return address

    async def kill(self, address: str) -> None:
        self._signal(address, signal.SIGKILL)

    async def freeze(self, address: str) -> None:
        self._signal(address, signal.SIGSTOP)

    def _signal(self, address: str, number: signal.Signals) -> None:
        os.kill(self._processes[address].pid, number)

    async def close(self) -> None:
        await self.dialer.close()
        for server in self._servers:
            await server.stop(0.5)
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
