"""VerifierService, ExchangeService and DrafterService around an endpoint.

Handlers take and give bytes: parsing is the codec's, so that a malformed message of an exchange
costs itself instead of the stream.
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
from outrider.transport.grpc.server import Service
from outrider.transport.grpc.shm_frames import LanedFrames
from outrider.transport.grpc.shm_negotiation import answering, join_offered
from outrider.transport.grpc.streams import StreamFrames
from outrider.transport.interface import Connection, DrafterEndpoint, VerifierEndpoint
from outrider.transport.tls import Role
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
"""A message without fields."""
_ENDPOINT_GRACE_S = 2.0
"""How long an endpoint may take to notice that its stream is gone."""

UnaryHandler = Callable[[bytes, Context], Awaitable[bytes]]


def _service(
    name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]], role: Role
) -> Service:
    handler = grpc.method_handlers_generic_handler(name, dict(methods))
    return Service(
        name=name,
        register=lambda server: server.add_generic_rpc_handlers((handler,)),
        roles=(role,),
    )


def _unary(handler: UnaryHandler) -> grpc.RpcMethodHandler[bytes, bytes]:
    return grpc.unary_unary_rpc_method_handler(handler)


def verifier_services(
    endpoint: VerifierEndpoint, config: GrpcConfig | None = None
) -> tuple[Service, Service]:
    """VerifierService and ExchangeService of an endpoint."""
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
            Role.ROUTER,
        ),
        _service(
            EXCHANGE_SERVICE,
            {"Exchange": grpc.stream_stream_rpc_method_handler(servicer.exchange)},
            Role.DRAFTER,
        ),
    )


def drafter_services(endpoint: DrafterEndpoint) -> tuple[Service]:
    """DrafterService of an endpoint."""
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
            Role.ROUTER,
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
        lane = None
        if self._config.lanes:
            lane = await join_offered(context.invocation_metadata() or ())
        await context.send_initial_metadata(answering(lane))
        logger.info(
            "a router's stream begins",
            extra={"peer": context.peer(), "by_lane": lane is not None},
        )
        call = _server_frames(context)
        frames = call if lane is None else LanedFrames(call, lane)
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
    connection: Connection[Any, Any],
    frames: StreamFrames | LanedFrames,
) -> None:
    serving = asyncio.create_task(serve(connection))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        # The endpoint hears of the loss from its connection, as over every transport.
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
        await self._endpoint.drain(decode_drain(request))
        return EMPTY
