"""RPCs of InferenceService with their encoders and decoders, which both clients share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import grpc

from outrider.client.collected_stream import CollectedStream
from outrider.errors import InternalError, InvalidMessageError, OutriderError
from outrider.ids import RequestId
from outrider.transport.grpc.error_status import to_lost_error
from outrider.transport.grpc.options import GrpcConfig, channel_options
from outrider.wire.inference import (
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    ServerInfo,
    StreamEvent,
    StreamPosition,
)
from outrider.wire.inference_codec import position_to_pb, request_to_pb, stream_request_to_pb
from outrider.wire.inference_response_codec import (
    event_from_pb,
    result_from_pb,
    resumed_event_from_pb,
)
from outrider.wire.server_info_codec import (
    abort_request_to_pb,
    abort_response_from_pb,
    models_from_pb,
    server_info_from_pb,
)
from outrider.wire.v1 import inference_pb2 as pb

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

Metadata = tuple[tuple[str, str], ...]
"""gRPC metadata of a call: pairs of key and value, with keys in lower case."""

DEFAULT_TIMEOUT_S = 600.0
"""Default timeout of a request in seconds; retries are included."""
INFO_TIMEOUT_S = 10.0
"""Timeout, in seconds, of calls other than those for answers and aborts."""
ABORT_TIMEOUT_S = 2.0
"""Timeout, in seconds, of the call that aborts resumable requests. If the call fails, the router
ends these requests after its grace time."""
_RECONNECT_MS = 200
"""Maximum pause between two attempts to connect, in milliseconds. It is short, because a router
that restarts serves again soon."""


@dataclass(frozen=True, slots=True)
class Rpc(Generic[RequestT, ResponseT]):
    """One RPC: its path, request encoder and response decoder."""

    name: str
    encode: Callable[[RequestT], bytes]
    _decode: Callable[[bytes], ResponseT]

    @property
    def path(self) -> str:
        """Path of the RPC in gRPC calls."""
        return f"/outrider.wire.v1.InferenceService/{self.name}"

    def decode(self, data: bytes) -> ResponseT:
        """Decode a response. Raises InternalError (BAD_RESPONSE) if it is malformed."""
        try:
            return self._decode(data)
        except InvalidMessageError as error:
            raise InternalError(
                f"the server's answer is malformed: {error.message}", reason="BAD_RESPONSE"
            ) from error


GENERATE: Rpc[GenerateRequest, GenerateResult] = Rpc(
    "Generate",
    lambda request: request_to_pb(request).SerializeToString(),
    lambda data: result_from_pb(pb.GenerateResponse.FromString(data)),
)
GENERATE_STREAM: Rpc[GenerateRequest, StreamEvent] = Rpc(
    "GenerateStream",
    lambda request: stream_request_to_pb(request).SerializeToString(),
    lambda data: event_from_pb(pb.GenerateStreamResponse.FromString(data)),
)
RESUME_STREAM: Rpc[StreamPosition, StreamEvent] = Rpc(
    "ResumeStream",
    lambda position: position_to_pb(position).SerializeToString(),
    lambda data: resumed_event_from_pb(pb.ResumeStreamResponse.FromString(data)),
)
ABORT: Rpc[Iterable[RequestId], tuple[RequestId, ...]] = Rpc(
    "Abort",
    lambda ids: abort_request_to_pb(ids).SerializeToString(),
    lambda data: abort_response_from_pb(pb.AbortResponse.FromString(data)),
)
SERVER_INFO: Rpc[None, ServerInfo] = Rpc(
    "GetServerInfo",
    lambda _: b"",
    lambda data: server_info_from_pb(pb.GetServerInfoResponse.FromString(data)),
)
LIST_MODELS: Rpc[None, tuple[ModelInfo, ...]] = Rpc(
    "ListModels",
    lambda _: b"",
    lambda data: models_from_pb(pb.ListModelsResponse.FromString(data)),
)


def stream_call(
    request: GenerateRequest, collected: CollectedStream, *, resume: bool
) -> tuple[str, bytes, Callable[[bytes], StreamEvent]]:
    """Return the path, the encoded request and the response decoder of a streaming call. If
    `resume` is True, the call continues the stream after the events in `collected`; else it starts
    the stream of `request`."""
    if not resume:
        return GENERATE_STREAM.path, GENERATE_STREAM.encode(request), GENERATE_STREAM.decode
    assert request.request_id is not None, "a resumable request is named by its client"
    position = collected.position(request.request_id)
    return RESUME_STREAM.path, RESUME_STREAM.encode(position), RESUME_STREAM.decode


def client_options() -> list[tuple[str, int]]:
    """Return the gRPC channel options for keepalive, message sizes and fast reconnection."""
    options = dict(channel_options(GrpcConfig()))
    options["grpc.max_reconnect_backoff_ms"] = _RECONNECT_MS
    # A new channel must not inherit the reconnection back-off of the broken one.
    options["grpc.use_local_subchannel_pool"] = 1
    return list(options.items())


def to_typed_error(error: grpc.RpcError, address: str) -> OutriderError:
    """Convert the gRPC error of a failed call to an OutriderError. Both clients use this
    function."""
    # A failed call of the synchronous client has the same accessors as an AioRpcError.
    return to_lost_error(cast("grpc.aio.AioRpcError", error), peer=address)
