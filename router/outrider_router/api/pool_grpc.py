"""PoolService over gRPC: adds drafters to a running router and removes them.

It has a separate address, because clients of the inference API must not be able to remove drafters
or make the router connect to addresses.
"""

from __future__ import annotations

from functools import partial

from outrider.errors import NotFoundError
from outrider.transport.grpc import GrpcService
from outrider.transport.grpc.error_status import Context
from outrider.transport.tls import CertificateRole
from outrider.wire.pool_codec import address_from_pb, removed_to_pb
from outrider.wire.v1 import pool_pb2 as pb
from outrider.wire.v1 import pool_pb2_grpc as pb_grpc
from outrider_router.requests.service import RouterService

POOL_SERVICE = "outrider.wire.v1.PoolService"
DRAIN_S = 10.0
"""Time in seconds that the sessions of a removed drafter get to move to other drafters."""


def pool_service(service: RouterService) -> GrpcService:
    """Create the gRPC service PoolService of a router."""
    servicer = _PoolServicer(service)
    return GrpcService(
        name=POOL_SERVICE,
        register=partial(pb_grpc.add_PoolServiceServicer_to_server, servicer),
        roles=(CertificateRole.OPERATOR,),
    )


class _PoolServicer(pb_grpc.PoolServiceServicer):
    """Servicer of PoolService. It raises typed errors, which the server's interceptor converts to
    gRPC statuses.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def AddDrafter(
        self, request: pb.AddDrafterRequest, context: Context
    ) -> pb.AddDrafterResponse:
        """Add a drafter, which the router polls from now on."""
        self._service.registry.add_drafter(address_from_pb(request))
        return pb.AddDrafterResponse()

    async def RemoveDrafter(
        self, request: pb.RemoveDrafterRequest, context: Context
    ) -> pb.RemoveDrafterResponse:
        """Move the sessions of a drafter to others, then remove the drafter. Raises NotFoundError
        for an unknown address.
        """
        address, registry = address_from_pb(request), self._service.registry
        peer = registry.drafters.get(address)
        if peer is None:
            raise NotFoundError(f"the router has no drafter at {address}", reason="NO_DRAFTER")
        removed = await self._service.mover.drain_drafter(peer, DRAIN_S)
        await registry.forget_drafter(peer)
        return removed_to_pb(removed)
