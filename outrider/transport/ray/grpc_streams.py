"""gRPC streams between processes that Ray has placed and named."""

from __future__ import annotations

from outrider.transport.grpc import GrpcConfig, GrpcDialer
from outrider.transport.interface import DrafterConnection, RouterConnection
from outrider.transport.ray.options import RayConfig


def grpc_config(config: RayConfig) -> GrpcConfig:
    """Settings of the gRPC ends of actors and of those who dial them."""
    return GrpcConfig(
        connect_timeout_s=config.control_timeout_s,
        control_timeout_s=config.control_timeout_s,
        heartbeat=config.heartbeat,
        sessions_heartbeat=config.sessions_heartbeat,
    )


class GrpcStreams:
    """Opens gRPC streams to actors; remembers the last known address of each."""

    def __init__(self, config: RayConfig) -> None:
        self._dialer = GrpcDialer(grpc_config(config))
        self._listening: dict[str, str] = {}

    async def exchange(self, name: str, listening: str) -> DrafterConnection:
        """An exchange with the actor `name`, which listens at HOST:PORT. UnavailableError."""
        await self._moved(name, listening)
        return await self._dialer.exchange(listening)

    async def sessions(self, name: str, listening: str) -> RouterConnection:
        """A stream of sessions to that actor. Raises UnavailableError."""
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
            # A new actor took the name: nobody will answer on the old one's channel again.
            await self._dialer.close_channel(before)
