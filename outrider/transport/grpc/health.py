"""Health service (grpc.health.v1) on grpc.aio, whose `Watch` streams report status changes."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import NotFoundError, ResourceExhaustedError
from outrider.transport.grpc.error_status import Context

SERVICE_NAME = "grpc.health.v1.Health"
"""Name of the health service. Its status under this name says whether the process is alive
(`GrpcServer.set_live`)."""
MAX_WATCHERS = 64
"""Maximum number of simultaneous `Watch` streams. It is limited because anybody may open them."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health service that reports the serving status of each service by name. The name "" stands
    for the whole server."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._watchers = 0

    def set_serving(self, services: tuple[str, ...], *, serving: bool) -> None:
        """Set the status of services and tell their watchers."""
        response = health_pb2.HealthCheckResponse
        value = response.SERVING if serving else response.NOT_SERVING
        for service in services:
            self._status[service] = int(value)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Context) -> Any:
        """Return the status of a service. Raises NOT_FOUND for an unknown service, as the health
        protocol requires.
        """
        status = self._status.get(request.service)
        if status is None:
            raise NotFoundError(f"unknown service {request.service!r}", reason="UNKNOWN_SERVICE")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> None:
        """Send the status of a service to the watcher now and when it has changed, until the RPC
        ends. Raises RESOURCE_EXHAUSTED if MAX_WATCHERS streams are open."""
        if self._watchers >= MAX_WATCHERS:
            raise ResourceExhaustedError("too many watch already", reason="TOO_MANY_WATCHERS")
        self._watchers += 1
        try:
            await self._tell(request, context)
        finally:
            self._watchers -= 1

    async def _tell(self, request: Any, context: Context) -> None:
        last: int | None = None
        while True:
            changed = self._changed
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            status = self._status.get(request.service, unknown)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()
