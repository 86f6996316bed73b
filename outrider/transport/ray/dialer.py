"""Ray dialer: control clients and exchange connections by actor name."""

from __future__ import annotations

from typing import Any

from outrider.errors import UnavailableError
from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.framed_connection import drafter_end, router_end
from outrider.transport.interface import DrafterConnection, RouterConnection
from outrider.transport.ray.actor_streams import ActorFrames
from outrider.transport.ray.calls import HostCalls, find_host
from outrider.transport.ray.grpc_streams import GrpcStreams
from outrider.transport.ray.options import GRPC, RayConfig
from outrider.transport.session_stream import SessionIteratorMixin
from outrider.wire.codec import (
    decode_drafter_info,
    decode_verifier_info,
    encode_close_session,
    encode_drain,
    encode_set_plan,
    encode_verifier_address,
)
from outrider.wire.messages import DrafterInfo, VerifierInfo


class _RayClient:
    """Control calls to an actor, which is looked up when it is first needed."""

    def __init__(self, address: str, config: RayConfig) -> None:
        self._address = address
        self._config = config
        self._found: HostCalls | None = None

    async def _host(self) -> HostCalls:
        if self._found is None:
            self._found = await find_host(self._address, self._config)
        return self._found

    async def _ask(self, host: HostCalls, method: str, *args: object) -> Any:
        try:
            return await host.call(method, *args)
        except UnavailableError:
            # The next call looks the name up again: a new actor may have taken it.
            self._found = None
            raise

    async def _call(self, method: str, request: bytes) -> bytes:
        response: bytes = await self._ask(await self._host(), "call", method, request)
        return response


class RayVerifier(_RayClient, SessionIteratorMixin):
    """Control client of a verifier over actor calls."""

    def __init__(self, address: str, config: RayConfig, streams: GrpcStreams) -> None:
        super().__init__(address, config)
        self._streams = streams

    async def info(self) -> VerifierInfo:
        """Return identity, capacity and load of the verifier."""
        return decode_verifier_info(await self._call("VerifierService/GetInfo", b""))

    async def sessions(self) -> RouterConnection:
        """Open a session stream to the verifier. Raises UnavailableError."""
        host = await self._host()
        if self._config.exchange == GRPC:
            listening: str = await self._ask(host, "stream_address")
            return await self._streams.sessions(host.address, listening)
        key: int = await self._ask(host, "open_sessions", "ray:router")
        return router_end(ActorFrames(host, key), self._config.heartbeat)

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Change a session's plan."""
        request = encode_set_plan(session_id, plan)
        await self._call("VerifierService/SetPlan", request)

    async def close_session(self, session_id: SessionId) -> None:
        """End a session."""
        request = encode_close_session(session_id)
        await self._call("VerifierService/CloseSession", request)


class RayDrafter(_RayClient):
    """Control client of a drafter over actor calls."""

    async def info(self) -> DrafterInfo:
        """Return identity and load of the drafter."""
        return decode_drafter_info(await self._call("DrafterService/GetInfo", b""))

    async def attach(self, verifier_address: str) -> None:
        """Connect the drafter to a verifier."""
        request = encode_verifier_address(verifier_address)
        await self._call("DrafterService/Attach", request)

    async def detach(self, verifier_address: str) -> None:
        """Disconnect the drafter from a verifier."""
        request = encode_verifier_address(verifier_address)
        await self._call("DrafterService/Detach", request)

    async def set_draining(self, draining: bool) -> None:
        """Set whether the drafter announces that it will stop."""
        await self._call("DrafterService/Drain", encode_drain(draining))


class RayDialer:
    """Opens connections to actors of one Ray cluster. The caller must have called `ray.init`."""

    def __init__(self, config: RayConfig | None = None) -> None:
        self._config = config or RayConfig()
        self._streams = GrpcStreams(self._config)

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError."""
        host = await find_host(verifier_address, self._config)
        if self._config.exchange == GRPC:
            listening: str = await host.call("stream_address")
            return await self._streams.exchange(host.address, listening)
        key: int = await host.call("open_exchange", "ray:drafter")
        return drafter_end(ActorFrames(host, key), self._config.heartbeat)

    async def verifier(self, address: str) -> RayVerifier:
        """Return a control client of the verifier at `address`."""
        return RayVerifier(address, self._config, self._streams)

    async def drafter(self, address: str) -> RayDrafter:
        """Return a control client of the drafter at `address`."""
        return RayDrafter(address, self._config)

    async def close_channel(self, address: str) -> None:
        """Close the gRPC channel to the actor named `address`, if one is open."""
        await self._streams.close_channel(address)

    async def close(self) -> None:
        """Close every gRPC channel. Connections over actor calls must be closed by their users."""
        await self._streams.close()
