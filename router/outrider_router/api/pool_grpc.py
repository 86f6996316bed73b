"""PoolService over gRPC: adds drafters to a running router and removes them.

It has an address of its own: clients that may request text must not be able to remove drafters, or
to make the router dial addresses.
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
"""How long a drafter that leaves waits for its sessions to be taken over."""


def pool_service(service: RouterService) -> GrpcService:
    """PoolService of a router."""
    servicer = _PoolServicer(service)
    return GrpcService(
        name=POOL_SERVICE,
        register=partial(pb_grpc.add_PoolServiceServicer_to_server, servicer),
        roles=(CertificateRole.OPERATOR,),
    )


class _PoolServicer(pb_grpc.PoolServiceServicer):
    """Errors are raised as they are; the server's interceptor makes statuses of them."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def AddDrafter(
        self, request: pb.AddDrafterRequest, context: Context
    ) -> pb.AddDrafterResponse:
        """Look for a drafter from now on."""
        self._service.registry.add_drafter(address_from_pb(request))
        return pb.AddDrafterResponse()

    async def RemoveDrafter(
        self, request: pb.RemoveDrafterRequest, context: Context
    ) -> pb.RemoveDrafterResponse:
        """Give its sessions to others, then forget it."""
        address, registry = address_from_pb(request), self._service.registry
        peer = registry.drafters.get(address)
        if peer is None:
            raise NotFoundError(f"the router has no drafter at {address}", reason="NO_DRAFTER")
        removed = await self._service.mover.drain_drafter(peer, DRAIN_S)
        await registry.forget_drafter(peer)
        return removed_to_pb(removed)
