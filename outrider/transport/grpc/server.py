"""gRPC server with health, reflection, error mapping and graceful stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import FailedPreconditionError
from outrider.transport.grpc import health
from outrider.transport.grpc.access import AccessGuard, AccessRules
from outrider.transport.grpc.credentials import server_credentials
from outrider.transport.grpc.interceptor import ErrorInterceptor
from outrider.transport.grpc.options import GrpcConfig, server_options
from outrider.transport.tls import CertificateRole

_HEALTH_PORT = GrpcConfig(max_connections=16, max_calls=64, max_receive_bytes=4096)
"""Settings of a port that serves only the health service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcService:
    """A gRPC service of a server: its name, its registration and the certificate roles that it
    accepts."""

    name: str
    """Full name, including the package; also the service's name in the health service."""
    register: Callable[[grpc.aio.Server], None]
    """Function that adds the handlers to a server, such as a generated `add_XServicer_to_server`
    bound to a servicer."""
    roles: tuple[CertificateRole, ...] = ()
    """Certificate roles whose holders may call the service, if the server requires client
    certificates. Empty accepts every role."""


class GrpcServer:
    """Serves gRPC services on one address, with health checks and reflection. The health service
    reports NOT_SERVING until `start` or `set_serving` sets it to serving."""

    def __init__(
        self,
        address: str,
        services: Sequence[GrpcService],
        *,
        config: GrpcConfig | None = None,
        access: AccessRules | None = None,
        health_address: str = "",
    ) -> None:
        """Create a server. `address` is host:port; with port 0 the system chooses a free port.
        Without `access`, connections are plain text and anybody may call.

        `health_address` is the host:port of a second port that serves only the health service; ""
        disables it. This port uses plain text, needs no certificate and limits its connections
        separately, so that a supervisor can reach it under any load.
        """
        self._address = address
        self._health_address = health_address
        self._services = tuple(services)
        self._config = config or GrpcConfig()
        self._access = access or AccessRules()
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self._health: health.HealthService | None = None

    @property
    def address(self) -> str:
        """Address on which the server listens, host:port; contains the real port after `start`."""
        return self._address

    @property
    def health_address(self) -> str:
        """Address of the health port, host:port; contains the real port after `start`; "" if there
        is none."""
        return self._health_address

    async def start(self, *, serving: bool = True) -> str:
        """Bind the address, start the server, and return the address with the real port. `serving`
        is the first status that the health service reports. Raises FailedPreconditionError if the
        address cannot be bound or the certificate cannot be used."""
        guard = AccessGuard(self._access, {each.name: each.roles for each in self._services})
        server = grpc.aio.server(
            interceptors=(ErrorInterceptor(guard),),
            options=server_options(self._config),
            maximum_concurrent_rpcs=self._config.max_calls,
        )
        self._health = health.HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for service in self._services:
            service.register(server)
        names = [service.name for service in self._services]
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        try:
            port = self._bind(server)
        except RuntimeError as error:
            raise _taken(self._address) from error
        self._address = _with_port(self._address, port)
        if self._health_address:
            await self._start_health()
        # The health service's own status says only that the process answers, for liveness probes.
        self._health.set_serving((health.SERVICE_NAME,), serving=True)
        await server.start()
        self._server = server
        self.set_serving(serving)
        return self._address

    async def _start_health(self) -> None:
        """Serve the health service on its own port. Raises FailedPreconditionError if it cannot be
        bound."""
        server = grpc.aio.server(
            interceptors=(ErrorInterceptor(AccessGuard(AccessRules(), {})),),
            options=server_options(_HEALTH_PORT),
            maximum_concurrent_rpcs=_HEALTH_PORT.max_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(self._health_address)
        except RuntimeError as error:
            raise _taken(self._health_address) from error
        self._health_address = _with_port(self._health_address, port)
        await server.start()
        self._health_server = server

    def _bind(self, server: grpc.aio.Server) -> int:
        """Bind the address and return the port. Raises RuntimeError if it cannot be bound."""
        access = self._access
        if access.tls.cert is None:
            return server.add_insecure_port(self._address)
        credentials = server_credentials(
            access.tls, require_client=access.require_client, on_handshake=access.on_handshake
        )
        return server.add_secure_port(self._address, credentials)

    def set_serving(self, serving: bool) -> None:
        """Set whether the health service reports the server and all its services as serving."""
        if self._health is not None:
            names = ("", *(service.name for service in self._services))
            self._health.set_serving(names, serving=serving)

    def set_live(self, live: bool) -> None:
        """Set whether liveness probes, which ask for the health service's own status, succeed."""
        if self._health is not None:
            self._health.set_serving((health.SERVICE_NAME,), serving=live)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report NOT_SERVING, wait at most `grace_s` seconds for running RPCs, and cancel those
        that remain."""
        if self._server is not None:
            server, self._server = self._server, None
            self.set_serving(False)
            await server.stop(grace_s)
        if self._health_server is not None:
            server, self._health_server = self._health_server, None
            await server.stop(None)

    async def wait_for_termination(self) -> None:
        """Wait until the server has stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()


def _taken(address: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"cannot listen on {address}", reason="ADDRESS_IN_USE")


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
