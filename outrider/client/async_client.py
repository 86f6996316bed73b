"""Asynchronous client of a router: `AsyncClient` and `AsyncStream`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from outrider.client.arguments import (
    check_address,
    check_kind,
    check_request_ids,
    check_timeout_s,
)
from outrider.client.async_calls import (
    AbortSender,
    await_answer,
    is_cancelled,
    replace_channel,
    wait_attempt,
    wait_retry,
)
from outrider.client.attempts import RequestAttempts
from outrider.client.channels import ChannelPool
from outrider.client.collected_stream import CollectedStream, left_error
from outrider.client.connection import RouterConnector, call_metadata, check_metadata
from outrider.client.options import GenerateOptions, PromptLike, make_request, with_new_id
from outrider.client.retry import RetryPolicy, remaining
from outrider.client.rpcs import (
    ABORT,
    DEFAULT_TIMEOUT_S,
    GENERATE,
    INFO_TIMEOUT_S,
    LIST_MODELS,
    SERVER_INFO,
    Metadata,
    Rpc,
    stream_call,
    to_typed_error,
)
from outrider.client.tracing import add_trace_metadata
from outrider.errors import OutriderError
from outrider.transport.tls import TlsConfig
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    PromptInfo,
    ServerInfo,
    StreamEvent,
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class AsyncClient:
    """Client of one router, for asyncio. Create it inside a running event loop and close it."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        metadata: Metadata = (),
        tls: TlsConfig | None = None,
        api_key: str | None = None,
        tenant: str | None = None,
    ) -> None:
        """Create a client; it connects at the first call.

        Args:
            address: HOST:PORT of the router.
            timeout_s: default limit of each request in seconds, retries included; None: no limit.
            retry: retry policy of calls and streams; None: the defaults of `RetryPolicy`.
            metadata: gRPC metadata of each call as (key, value); keys in lower case.
            tls: TLS settings, mutual TLS if they have a `cert`; None: plain text.
            api_key: API key of each call; None: the value of the environment variable
                OUTRIDER_API_KEY, if it is set.
            tenant: tenant of the requests, for routers with `overload.tenant_from = "metadata"`.

        Raises:
            FailedPreconditionError: certificates are invalid (BAD_TLS).
            InvalidRequestError: an argument has the wrong type, or a key, tenant or metadata is not
                a valid header.
        """
        self.address = check_address(address)
        self._metadata = call_metadata(metadata, api_key=api_key, tenant=tenant)
        self._timeout_s = check_timeout_s(timeout_s)
        self._retry = check_kind("retry", retry, RetryPolicy) or RetryPolicy()
        self._channels = ChannelPool(
            RouterConnector(address, check_kind("tls", tls, TlsConfig)).aio_channel
        )
        self._farewells = AbortSender(self._channels)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and abort all running requests of this client."""
        channels = self._channels.take_all()
        await self._farewells.send_all(channels[0])
        for channel in channels:
            await channel.close()

    async def generate(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Continue a prompt and return the complete answer.

        Args:
            prompt: a text, token ids, or a conversation.
            timeout_s: limit of this request instead of the client's.
            metadata: gRPC metadata of this request, in addition to the client's.
            options: see `GenerateOptions`.

        Raises:
            OutriderError: any error; `reason` is machine-readable.
        """
        said = self._said(metadata)
        request, deadline = make_request(prompt, options), self._deadline(timeout_s)
        attempts = RequestAttempts(self._retry, resumable=request.resumable)
        self._farewells.wanted.add_request(attempts, request, said)
        try:
            answer = await self._attempt(request, attempts, deadline, said)
        except asyncio.CancelledError:
            self._farewells.send_abort(attempts)
            raise
        finally:
            self._farewells.wanted.remove_request(attempts)
        if answer is not None:
            return answer
        # The request has arrived, its answer has not: that is taken up as a stream.
        async with self._open(request, attempts, deadline, said, resume=True) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Continue a prompt and stream the answer. The arguments are those of `generate`.

        The request is sent when iteration begins, and its errors are raised during iteration.
        """
        request = make_request(prompt, options)
        attempts = RequestAttempts(self._retry, resumable=request.resumable)
        return self._open(request, attempts, self._deadline(timeout_s), self._said(metadata))

    async def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Cancel requests by id and return the ids that were queued or running."""
        ids = check_request_ids(request_ids)
        return await self._call(ABORT, ids, INFO_TIMEOUT_S)

    async def server_info(self) -> ServerInfo:
        """Return the state of the router and its fleet."""
        return await self._call(SERVER_INFO, None, INFO_TIMEOUT_S)

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        return await self._call(LIST_MODELS, None, INFO_TIMEOUT_S)

    def _said(self, metadata: Metadata) -> Metadata:
        """Return the gRPC metadata of a request: the client's, `metadata`, and the trace context of
        the caller."""
        return add_trace_metadata((*self._metadata, *check_metadata(metadata)))

    def _deadline(self, timeout_s: float | None) -> float | None:
        limit_s = self._timeout_s if timeout_s is None else check_timeout_s(timeout_s)
        return None if limit_s is None else time.monotonic() + limit_s

    def _open(
        self,
        request: GenerateRequest,
        attempts: RequestAttempts,
        deadline: float | None,
        metadata: Metadata,
        *,
        resume: bool = False,
    ) -> AsyncStream:
        return AsyncStream(
            self._channels,
            self.address,
            request,
            attempts,
            deadline,
            farewells=self._farewells,
            metadata=metadata,
            resume=resume,
        )

    async def _attempt(
        self,
        request: GenerateRequest,
        attempts: RequestAttempts,
        deadline: float | None,
        metadata: Metadata,
    ) -> GenerateResult | None:
        """Send a request and return the answer. Return None if the answer must be read as a resumed
        stream instead."""
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        data = GENERATE.encode(request)
        while True:
            channel = self._channels.current
            method = channel.unary_unary(GENERATE.path)
            try:
                timeout_s = remaining(deadline, time.monotonic())
                call = method(data, timeout=timeout_s, metadata=metadata)
                answer = await await_answer(self._channels, call)
                return GENERATE.decode(answer)
            except grpc.aio.AioRpcError as error:
                problem = to_typed_error(error, self.address)
            await replace_channel(self._channels, channel, problem)
            if await wait_attempt(
                attempts.decide_after(problem, now=time.monotonic()), problem, deadline
            ):
                return None

    async def _call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout_s: float | None
    ) -> ResponseT:
        data = rpc.encode(request)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        attempt = 1
        while True:
            channel = self._channels.current
            method = channel.unary_unary(rpc.path)
            try:
                left_s = remaining(deadline, time.monotonic())
                call = method(data, timeout=left_s, metadata=self._metadata)
                answer = await await_answer(self._channels, call)
                return rpc.decode(answer)
            except grpc.aio.AioRpcError as error:
                problem = to_typed_error(error, self.address)
            await replace_channel(self._channels, channel, problem)
            await wait_retry(self._retry, attempt, problem, deadline)
            attempt += 1


class AsyncStream:
    """Stream of an answer: an asynchronous iterator of deltas and a context manager.

    Leaving the context before the end cancels the request. A lost connection is reopened and the
    stream continues after the last received delta, unless the request has `resume=False`.
    """

    def __init__(
        self,
        channels: ChannelPool[grpc.aio.Channel],
        address: str,
        request: GenerateRequest,
        attempts: RequestAttempts,
        deadline: float | None,
        *,
        farewells: AbortSender,
        metadata: Metadata,
        resume: bool = False,
    ) -> None:
        self._channels = channels
        self._channel: grpc.aio.Channel
        """Channel of the present call."""
        self._address = address
        self._request = request
        self._attempts = attempts
        self._deadline = deadline
        self._farewells = farewells
        self._metadata = metadata
        self._resume = resume
        self._collected = CollectedStream()
        self._call: grpc.aio.UnaryStreamCall[bytes, bytes] | None = None
        self._decode: Callable[[bytes], StreamEvent]
        self._over = False

    @property
    def info(self) -> PromptInfo | None:
        """Id and prompt length of the request, or None until the server has admitted it."""
        return self._collected.info

    @property
    def finish(self) -> FinishInfo | None:
        """Finish reason, usage and statistics, or None until the answer has ended."""
        return self._collected.finish

    @property
    def text(self) -> str:
        """Text received so far."""
        return self._collected.text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._over:
            problem: OutriderError | None = None
            try:
                delta = await self._step()
            except grpc.aio.AioRpcError as error:
                delta, problem = None, to_typed_error(error, self._address)
            except OutriderError as error:
                # An answer that makes no sense, or a client that was closed.
                if not self._over:
                    self._collected.fail(error)
                    self._leave()
                raise
            if delta is not None:
                return delta
            if problem is not None and not self._over:
                await self._recover(problem)
        raise StopAsyncIteration

    async def result(self) -> GenerateResult:
        """Read the stream to its end and return the complete answer."""
        async for _ in self:
            pass
        return self._collected.result()

    async def close(self) -> None:
        """Cancel the request if it is still running; idempotent."""
        if not self._over:
            await asyncio.shield(self._leave())

    async def _step(self) -> Delta | None:
        if self._call is None:
            path, data, self._decode = stream_call(
                self._request, self._collected, resume=self._resume
            )
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            self._channel = self._channels.current
            method = self._channel.unary_stream(path)
            timeout_s = remaining(self._deadline, time.monotonic())
            self._farewells.wanted.add_request(self._attempts, self._request, self._metadata)
            self._call = method(data, timeout=timeout_s, metadata=self._metadata)
            self._farewells.calls.add(self._call)
        try:
            message = await await_answer(self._channels, self._call.read())
        except asyncio.CancelledError:
            # grpc.aio reports a call that `close` cancelled as if its reader were cancelled.
            if not self._over or is_cancelled():
                self._leave()
                raise
            return None
        if isinstance(message, bytes):
            self._attempts.record_message()
            return self._collected.add_event(self._decode(message))
        self._end()
        return None

    async def _recover(self, problem: OutriderError) -> None:
        self._call = None
        try:
            await replace_channel(self._channels, self._channel, problem)
            again = self._attempts.decide_after(
                problem,
                informed=self._collected.info is not None,
                told=self._collected.has_tokens,
                now=time.monotonic(),
            )
            self._resume = await wait_attempt(again, problem, self._deadline)
            if again.needs_new_id:
                self._request = with_new_id(self._request)
        except OutriderError as error:
            self._collected.fail(error)
            self._end()
            raise
        except asyncio.CancelledError:
            self._leave()
            raise

    def _end(self) -> None:
        self._over = True
        self._farewells.wanted.remove_request(self._attempts)

    def _leave(self) -> asyncio.Future[list[Any]]:
        """Stop reading and abort the request. Return a future that completes when the router has
        answered the abort."""
        self._over = True
        self._collected.fail(left_error())
        if self._call is not None:
            self._call.cancel()
        return self._farewells.send_abort(self._attempts)
