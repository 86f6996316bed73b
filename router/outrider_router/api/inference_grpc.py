"""InferenceService over gRPC: decodes requests for `RouterService` and encodes its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from google.protobuf.message import Message

from outrider.errors import ResourceExhaustedError
from outrider.transport.grpc import GrpcService
from outrider.transport.grpc.error_status import Context
from outrider.transport.tls import CertificateRole
from outrider.wire.inference import StreamEvent
from outrider.wire.inference_codec import position_from_pb, request_from_pb, stream_request_from_pb
from outrider.wire.inference_response_codec import event_to_pb, result_to_pb, resumed_event_to_pb
from outrider.wire.server_info_codec import (
    abort_request_from_pb,
    abort_response_to_pb,
    models_to_pb,
    server_info_to_pb,
)
from outrider.wire.v1 import inference_pb2 as pb
from outrider.wire.v1 import inference_pb2_grpc as pb_grpc
from outrider_router.api import server_status
from outrider_router.api.stream_forwarding import FOUND_KEY, StreamForwarder, is_forwarded
from outrider_router.base.slow_readers import SLOW_READER, with_write_timeout
from outrider_router.base.tenants import Caller
from outrider_router.requests.parsed_answer import EventWriter
from outrider_router.requests.service import RouterService

INFERENCE_SERVICE = "outrider.wire.v1.InferenceService"


def inference_service(
    service: RouterService, forwarder: StreamForwarder | None = None
) -> GrpcService:
    """Create the gRPC service InferenceService of a router. `forwarder` finds streams that clients
    resume here and that other routers have; with None they are refused.
    """
    servicer = _InferenceServicer(service, forwarder)
    return GrpcService(
        name=INFERENCE_SERVICE,
        register=partial(pb_grpc.add_InferenceServiceServicer_to_server, servicer),
        # Routers forward resumed streams.
        roles=(CertificateRole.CLIENT, CertificateRole.OPERATOR, CertificateRole.ROUTER),
    )


class _InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Servicer of InferenceService. It raises typed errors, which the server's interceptor converts
    to gRPC statuses.
    """

    def __init__(self, service: RouterService, forwarder: StreamForwarder | None) -> None:
        self._service = service
        self._forwarder = forwarder

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Serve a request and return the whole output."""
        await self._service.arrivals.wait_turn()
        result = await self._service.generate(
            request_from_pb(request),
            timeout_s=context.time_remaining(),
            caller=self._caller(context),
            traceparent=_traceparent(context),
        )
        return result_to_pb(result)

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Context) -> None:
        """Serve a request as a stream.

        The method is a coroutine that writes messages, not a generator. When the client
        disconnects, it is cancelled at once, so the request is released without waiting for garbage
        collection.
        """
        await self._service.arrivals.wait_turn()
        async with self._timely(context, event_to_pb) as write:
            await self._service.serve_request(
                stream_request_from_pb(request),
                write,
                timeout_s=context.time_remaining(),
                caller=self._caller(context),
                traceparent=_traceparent(context),
            )

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: Context) -> None:
        """Send the rest of a resumable request's stream, through the router that has it if it is
        not this one.
        """
        position, caller = position_from_pb(request), self._caller(context)
        metadata = context.invocation_metadata() or ()
        forwarded = is_forwarded(metadata)
        is_here = self._service.has_stream(position.request_id, caller)
        if not (is_here or forwarded) and self._forwarder is not None:
            self._service.check_accepting()
            async with self._timely(context, resumed_event_to_pb) as write:
                await self._forwarder.forward_stream(
                    request, metadata, write, timeout_s=context.time_remaining()
                )
            return
        async with self._timely(context, resumed_event_to_pb, found=forwarded and is_here) as write:
            await self._service.resume_stream(position, write, caller, is_forwarded=forwarded)

    def _caller(self, context: Context) -> Caller:
        return self._service.access_control.identify_caller(context.invocation_metadata() or ())

    @asynccontextmanager
    async def _timely(
        self, context: Context, encode: Callable[[StreamEvent], Message], *, found: bool = False
    ) -> AsyncGenerator[EventWriter, None]:
        """Yield a function that writes the messages of a stream. With `found` the initial metadata
        tell another router at once that the request is here.
        """
        begun = _Beginning(context, ((FOUND_KEY, "1"),) if found else ())

        async def write(event: StreamEvent) -> None:
            await begun.begin()
            await context.write(encode(event))

        slow_reader_timeout_s = self._service.config.overload.slow_reader_timeout_s
        try:
            try:
                if found:
                    await begun.begin()
                async with with_write_timeout(
                    write, slow_reader_timeout_s=slow_reader_timeout_s
                ) as timed:
                    yield timed
            finally:
                await begun.settle()
        except ResourceExhaustedError as error:
            if error.reason == SLOW_READER:
                self._service.metrics.refusals.labels(SLOW_READER).inc()
            raise

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Abort requests by id."""
        ids = abort_request_from_pb(request)
        return abort_response_to_pb(self._service.abort_requests(ids, self._caller(context)))

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return the state of the router and its fleet."""
        return server_info_to_pb(server_status.make_server_info(self._service))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Return the served models."""
        return models_to_pb(server_status.make_model_list(self._service))


class _Beginning:
    """Sends the initial metadata of a stream separately, before its first message.

    If the metadata were sent together with the first message, a status sent meanwhile would include
    them again, gRPC would refuse that, and the client would never get the status. They are not sent
    when the call arrives, because opening the session on the verifier comes first.
    """

    def __init__(self, context: Context, metadata: Sequence[tuple[str, str]]) -> None:
        self._context = context
        self._metadata = metadata
        self._sending: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Send the initial metadata on the first call. Cancelling this does not cancel sending."""
        if self._sending is None:
            self._sending = asyncio.create_task(self._context.send_initial_metadata(self._metadata))
        if not self._sending.done():
            await asyncio.shield(self._sending)

    async def settle(self) -> None:
        """Wait until the initial metadata are sent, if sending has begun, so that a status may
        follow.
        """
        if self._sending is None:
            return
        if not self._sending.done():
            await asyncio.wait((self._sending,))
        if not self._sending.cancelled():
            # Marks the exception as retrieved; `begin` has raised it if its caller still waits.
            self._sending.exception()


def _traceparent(context: Context) -> str:
    """Return the W3C Trace Context of the caller, or "" if there is none."""
    metadata = context.invocation_metadata() or ()
    found = next((value for key, value in metadata if key == "traceparent"), "")
    return found if isinstance(found, str) else ""
