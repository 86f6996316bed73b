"""gRPC servicers (VerifierService, ExchangeService, DrafterService) of an endpoint.

Handlers take and return bytes, which the codec of `outrider.wire` parses. A malformed exchange
message is therefore dropped without ending the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import grpc

from outrider.errors import ConnectionLostError
from outrider.transport.framed_connection import serving_end, verifier_end
from outrider.transport.grpc.error_status import Context
from outrider.transport.grpc.options import GrpcConfig
from outrider.transport.grpc.server import GrpcService
from outrider.transport.grpc.shm_frames import ShmFrames
from outrider.transport.grpc.shm_negotiation import answer_metadata, join_offered_channel
from outrider.transport.grpc.streams import StreamFrames
from outrider.transport.interface import DrafterEndpoint, ExchangeConnection, VerifierEndpoint
from outrider.transport.tls import CertificateRole
from outrider.wire.codec import (
    decode_attach,
    decode_close_session,
    decode_detach,
    decode_drain,
    decode_set_plan,
    encode_drafter_info,
    encode_verifier_info,
)

logger = logging.getLogger(__name__)

VERIFIER_SERVICE = "outrider.wire.v1.VerifierService"
EXCHANGE_SERVICE = "outrider.wire.v1.ExchangeService"
DRAFTER_SERVICE = "outrider.wire.v1.DrafterService"
EMPTY = b""
"""Encoding of a message without fields."""
_ENDPOINT_GRACE_S = 2.0
"""Seconds that an endpoint has to notice that its stream is lost."""

UnaryHandler = Callable[[bytes, Context], Awaitable[bytes]]


def _service(
    name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]], role: CertificateRole
) -> GrpcService:
    handler = grpc.method_handlers_generic_handler(name, dict(methods))
    return GrpcService(
        name=name,
        register=lambda server: server.add_generic_rpc_handlers((handler,)),
        roles=(role,),
    )


def _unary(handler: UnaryHandler) -> grpc.RpcMethodHandler[bytes, bytes]:
    return grpc.unary_unary_rpc_method_handler(handler)


def verifier_services(
    endpoint: VerifierEndpoint, config: GrpcConfig | None = None
) -> tuple[GrpcService, GrpcService]:
    """Return the VerifierService and the ExchangeService of an endpoint."""
    servicer = _VerifierServicer(endpoint, config or GrpcConfig())
    return (
        _service(
            VERIFIER_SERVICE,
            {
                "GetInfo": _unary(servicer.get_info),
                "Sessions": grpc.stream_stream_rpc_method_handler(servicer.sessions),
                "SetPlan": _unary(servicer.set_plan),
                "CloseSession": _unary(servicer.close_session),
            },
            CertificateRole.ROUTER,
        ),
        _service(
            EXCHANGE_SERVICE,
            {"Exchange": grpc.stream_stream_rpc_method_handler(servicer.exchange)},
            CertificateRole.DRAFTER,
        ),
    )


def drafter_services(endpoint: DrafterEndpoint) -> tuple[GrpcService]:
    """Return the DrafterService of an endpoint."""
    servicer = _DrafterServicer(endpoint)
    return (
        _service(
            DRAFTER_SERVICE,
            {
                "GetInfo": _unary(servicer.get_info),
                "Attach": _unary(servicer.attach),
                "Detach": _unary(servicer.detach),
                "Drain": _unary(servicer.drain),
            },
            CertificateRole.ROUTER,
        ),
    )


class _VerifierServicer:
    def __init__(self, endpoint: VerifierEndpoint, config: GrpcConfig) -> None:
        self._endpoint = endpoint
        self._config = config

    async def get_info(self, _request: bytes, _context: Context) -> bytes:
        return encode_verifier_info(await self._endpoint.info())

    async def set_plan(self, request: bytes, _context: Context) -> bytes:
        await self._endpoint.set_plan(*decode_set_plan(request))
        return EMPTY

    async def close_session(self, request: bytes, _context: Context) -> bytes:
        await self._endpoint.close_session(decode_close_session(request))
        return EMPTY

    async def sessions(self, _requests: object, context: Context) -> None:
        shm_channel = None
        if self._config.shm_channels:
            shm_channel = await join_offered_channel(context.invocation_metadata() or ())
        await context.send_initial_metadata(answer_metadata(shm_channel))
        logger.info(
            "a router's stream begins",
            extra={"peer": context.peer(), "by_shm": shm_channel is not None},
        )
        call = _server_frames(context)
        frames = call if shm_channel is None else ShmFrames(call, shm_channel)
        connection = serving_end(frames, self._config.sessions_heartbeat)
        await _serve(self._endpoint.serve_sessions, connection, frames)

    async def exchange(self, _requests: object, context: Context) -> None:
        await context.send_initial_metadata(())
        frames = _server_frames(context)
        connection = verifier_end(
            frames, self._config.heartbeat, bundle_bytes=self._config.bundle_bytes
        )
        await _serve(self._endpoint.exchange, connection, frames)


async def _serve(
    serve: Callable[[Any], Coroutine[Any, Any, None]],
    connection: ExchangeConnection[Any, Any],
    frames: StreamFrames | ShmFrames,
) -> None:
    serving = asyncio.create_task(serve(connection))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        # The connection reports the loss to the endpoint, as with every transport.
        frames.abort(ConnectionLostError(f"lost {frames.peer}", reason="PEER_LOST"))
        await asyncio.wait((serving,), timeout=_ENDPOINT_GRACE_S)
        serving.cancel()
        raise
    finally:
        await connection.close()


def _server_frames(context: Context) -> StreamFrames:
    peer = context.peer()

    async def read() -> bytes | None:
        try:
            frame = await context.read()
        except Exception as error:
            raise ConnectionLostError(f"lost {peer}", reason="PEER_LOST") from error
        return None if frame is grpc.aio.EOF else frame

    async def write(frame: bytes) -> None:
        try:
            await context.write(frame)
        except Exception as error:
            raise ConnectionLostError(f"lost {peer}", reason="PEER_LOST") from error

    return StreamFrames(peer, read, write)


class _DrafterServicer:
    def __init__(self, endpoint: DrafterEndpoint) -> None:
        self._endpoint = endpoint

    async def get_info(self, _request: bytes, _context: Context) -> bytes:
        return encode_drafter_info(await self._endpoint.info())

    async def attach(self, request: bytes, _context: Context) -> bytes:
        await self._endpoint.attach(decode_attach(request))
        return EMPTY

    async def detach(self, request: bytes, _context: Context) -> bytes:
        await self._endpoint.detach(decode_detach(request))
        return EMPTY

    async def drain(self, request: bytes, _context: Context) -> bytes:
        await self._endpoint.set_draining(decode_drain(request))
        return EMPTY
