"""Server interceptor: authorises callers and turns errors into gRPC statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidMessageError, OutriderError
from outrider.transport.grpc.access import AccessGuard
from outrider.transport.grpc.error_status import Context, abort_call

Handler = Callable[..., Any]
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Deserializer = Callable[[bytes], Any]
Check = Callable[[Context], None]


class _Malformed:
    """Placeholder for a request that could not be parsed. The handler's wrapper answers it with an
    error."""


def _tolerant(deserializer: Deserializer | None) -> Deserializer | None:
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _Malformed()

    return parse


def _check(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidMessageError("the request is not valid protobuf", reason="INVALID_MESSAGE")
    return request


def _guard(handler: Handler, check: Check | None) -> Handler:
    """Wrap a handler with an access check, and map the errors of both to gRPC statuses. The wrapper
    of an async generator is an async generator too."""
    if isasyncgenfunction(handler):

        async def stream(request: Any, context: Context) -> AsyncGenerator[Any]:
            try:
                if check is not None:
                    check(context)
                async with aclosing(handler(_check(request), context)) as responses:
                    async for response in responses:
                        yield response
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
            except Exception as error:
                await abort_call(context, error)

        return stream

    async def call(request: Any, context: Context) -> Any:
        try:
            if check is not None:
                check(context)
            return await handler(_check(request), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort_call(context, error)

    return call


def _refusal(error: OutriderError) -> MethodHandler:
    """Return a handler that answers a call of any kind with an error, without reading its
    messages."""

    async def refuse(_requests: object, context: Context) -> None:
        await abort_call(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Rejects unauthorised callers and maps errors to gRPC statuses. An error of `outrider.errors`
    gets a status with details. Any other error is logged and gets the status INTERNAL."""

    def __init__(self, guard: AccessGuard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Wrap the handler of a call, if there is one, with checks and error mapping."""
        try:
            self._guard.check_call(handler_call_details)
        except OutriderError as error:
            return _refusal(error)
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        check = self._guard.role_check(handler_call_details.method)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                deserializer = handler.request_deserializer
                wrapped: MethodHandler = make(
                    _guard(behaviour, check),
                    # A streamed request is parsed message by message by its own handler.
                    deserializer if handler.request_streaming else _tolerant(deserializer),
                    handler.response_serializer,
                )
                return wrapped
        raise AssertionError("a handler has one behaviour")
