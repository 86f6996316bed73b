"""gRPC streams between Ray actors, which are addressed by name."""

from __future__ import annotations

from outrider.transport.grpc import GrpcConfig, GrpcDialer
from outrider.transport.interface import DrafterConnection, RouterConnection
from outrider.transport.ray.options import RayConfig


def grpc_config(config: RayConfig) -> GrpcConfig:
    """Return the settings of gRPC servers in actors and of their clients."""
    return GrpcConfig(
        connect_timeout_s=config.control_timeout_s,
        control_timeout_s=config.control_timeout_s,
        heartbeat=config.heartbeat,
        sessions_heartbeat=config.sessions_heartbeat,
    )


class GrpcStreams:
    """Opens gRPC streams to actors and remembers the last known address of each."""

    def __init__(self, config: RayConfig) -> None:
        self._dialer = GrpcDialer(grpc_config(config))
        self._listening: dict[str, str] = {}

    async def exchange(self, name: str, listening: str) -> DrafterConnection:
        """Open an exchange with the actor `name`, which listens at `listening` (HOST:PORT). Raises
        UnavailableError."""
        await self._moved(name, listening)
        return await self._dialer.exchange(listening)

    async def sessions(self, name: str, listening: str) -> RouterConnection:
        """Open a session stream to the actor `name`, which listens at `listening` (HOST:PORT).
        Raises UnavailableError."""
        await self._moved(name, listening)
        return await (await self._dialer.verifier(listening)).sessions()

    async def close_channel(self, name: str) -> None:
        """Close the channel to the actor `name`, if there is one."""
        listening = self._listening.pop(name, None)
        if listening is not None:
            await self._dialer.close_channel(listening)

    async def close(self) -> None:
        """Close every channel."""
        await self._dialer.close()

    async def _moved(self, name: str, listening: str) -> None:
        before = self._listening.get(name, listening)
        self._listening[name] = listening
        if before != listening:
            # A new actor has taken the name, so the old one's address is dead.
            await self._dialer.close_channel(before)
