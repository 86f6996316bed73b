"""InferenceService over gRPC: messages in, messages out; the rest is `RouterService`."""

from __future__ import annotations

from functools import partial

from outrider.transport.grpc import Service
from outrider.transport.grpc.status import Context
from outrider.wire.inference_codec import (
    event_to_pb,
    position_from_pb,
    request_from_pb,
    result_to_pb,
    resumed_event_to_pb,
    stream_request_from_pb,
)
from outrider.wire.server_info_codec import (
    abort_request_from_pb,
    abort_response_to_pb,
    models_to_pb,
    server_info_to_pb,
)
from outrider.wire.v1 import inference_pb2 as pb
from outrider.wire.v1 import inference_pb2_grpc as pb_grpc
from outrider_router import status
from outrider_router.service import RouterService

INFERENCE_SERVICE = "outrider.wire.v1.InferenceService"


def inference_service(service: RouterService) -> Service:
    """InferenceService of a router."""
    servicer = _Servicer(service)
    return Service(
        name=INFERENCE_SERVICE,
        register=partial(pb_grpc.add_InferenceServiceServicer_to_server, servicer),
    )


class _Servicer(pb_grpc.InferenceServiceServicer):
    """Errors are raised as they are; the server's interceptor makes statuses of them."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Answer once."""
        result = await self._service.generate(
            request_from_pb(request), timeout_s=context.time_remaining()
        )
        return result_to_pb(result)

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Context) -> None:
        """Answer as a stream.

        A coroutine that writes, not a generator: when the client goes away it is cancelled here,
        and the request is freed at once instead of at garbage collection.
        """
        await self._service.serve(
            stream_request_from_pb(request),
            lambda event: context.write(event_to_pb(event)),
            timeout_s=context.time_remaining(),
        )

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: Context) -> None:
        """Go on with a stream, likewise."""
        await self._service.resume(
            position_from_pb(request), lambda event: context.write(resumed_event_to_pb(event))
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Cancel requests by id."""
        return abort_response_to_pb(self._service.abort(abort_request_from_pb(request)))

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """The router's state."""
        return server_info_to_pb(status.server_info(self._service))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Served models."""
        return models_to_pb(status.models(self._service))
