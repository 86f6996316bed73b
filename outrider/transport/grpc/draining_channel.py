"""gRPC channel that can be closed as soon as its last call has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

Metadata = tuple[tuple[str, str], ...]
ServerStream = grpc.aio.UnaryStreamCall[bytes, bytes]
Call = (
    grpc.aio.UnaryUnaryCall[bytes, bytes] | ServerStream | grpc.aio.StreamStreamCall[bytes, bytes]
)


class DrainingChannel:
    """A gRPC channel that counts its calls and can be closed when all of them have ended. It may be
    used on one event loop only."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._calls = 0
        self._on_closed: Callable[[DrainingChannel], object] | None = None
        self._closing: asyncio.Task[None] | None = None

    def unary(
        self, path: str, request: bytes, timeout_s: float
    ) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        """Begin a unary call with a timeout in seconds."""
        rpc: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(path)
        call = rpc(request, timeout=timeout_s)
        self._begun(call)
        return call

    def server_stream(
        self,
        path: str,
        request: bytes,
        timeout_s: float | None,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> ServerStream:
        """Begin a call with one request and a stream of responses. `timeout_s` is its timeout in
        seconds; None for none."""
        rpc: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(path)
        call = rpc(request, timeout=timeout_s, metadata=tuple(metadata))
        self._begun(call)
        return call

    def stream(self, path: str, metadata: Metadata = ()) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """Begin a bidirectional stream."""
        rpc: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(path)
        call = rpc(metadata=metadata)
        self._begun(call)
        return call

    def close_after_calls(self, on_closed: Callable[[DrainingChannel], object]) -> None:
        """Close the channel when its last call has ended, or now if no call is running. Then call
        `on_closed`. No call may begin after this method was called."""
        self._on_closed = on_closed
        self._close_if_idle()

    async def close(self) -> None:
        """Close the channel now and end its calls. Idempotent."""
        self._on_closed = None
        await self.channel.close()
        if self._closing is not None:
            await self._closing

    def _begun(self, call: Call) -> None:
        self._calls += 1
        call.add_done_callback(self._ended)

    def _ended(self, _call: Any) -> None:
        self._calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._on_closed is not None and not self._calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(self._on_closed))

    async def _close(self, on_closed: Callable[[DrainingChannel], object]) -> None:
        await self.channel.close()
        on_closed(self)
