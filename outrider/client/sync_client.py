"""Synchronous client of a router: `Client` and `Stream`. Thread-safe.

The module mirrors `outrider.client.async_client`: each change to one of them must be made in the
other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from outrider.client.arguments import (
    check_address,
    check_kind,
    check_request_ids,
    check_timeout_s,
)
from outrider.client.attempts import RequestAttempts
from outrider.client.channels import ChannelPool
from outrider.client.collected_stream import CollectedStream, left_error
from outrider.client.connection import RouterConnector, call_metadata, check_metadata
from outrider.client.options import GenerateOptions, PromptLike, make_request, with_new_id
from outrider.client.pending_requests import PendingRequests
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
from outrider.client.sync_calls import (
    convert_call_errors,
    replace_channel,
    send_abort,
    send_aborts,
    wait_attempt,
    wait_retry,
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


class Client:
    """Client of one router. Close it after use, or use it as a context manager."""

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
            RouterConnector(address, check_kind("tls", tls, TlsConfig)).channel
        )
        self._wanted = PendingRequests()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and abort all running requests of this client."""
        channels = self._channels.take_all()
        if left := self._wanted.take_all():
            send_aborts(channels[0], left)
        for channel in channels:
            channel.close()

    def generate(
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
        self._wanted.add_request(attempts, request, said)
        try:
            answer = self._attempt(request, attempts, deadline, said)
        except OutriderError:
            raise
        except BaseException:
            # An interrupt such as Ctrl-C: the answer is no longer needed.
            send_abort(self._channels, self._wanted.remove_request(attempts))
            raise
        finally:
            self._wanted.remove_request(attempts)
        if answer is not None:
            return answer
        # The request reached the router but the answer was lost, so continue it as a stream.
        with self._open(request, attempts, deadline, said, resume=True) as stream:
            return stream.result()

    def stream(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Continue a prompt and stream the answer. The arguments are those of `generate`.

        The request is sent when iteration begins, and its errors are raised during iteration.
        """
        request = make_request(prompt, options)
        attempts = RequestAttempts(self._retry, resumable=request.resumable)
        return self._open(request, attempts, self._deadline(timeout_s), self._said(metadata))

    def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Cancel requests by id and return the ids that were queued or running."""
        ids = check_request_ids(request_ids)
        return self._call(ABORT, ids, INFO_TIMEOUT_S)

    def server_info(self) -> ServerInfo:
        """Return the state of the router and its fleet."""
        return self._call(SERVER_INFO, None, INFO_TIMEOUT_S)

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        return self._call(LIST_MODELS, None, INFO_TIMEOUT_S)

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
    ) -> Stream:
        return Stream(
            self._channels,
            self.address,
            request,
            attempts,
            deadline,
            wanted=self._wanted,
            metadata=metadata,
            resume=resume,
        )

    def _attempt(
        self,
        request: GenerateRequest,
        attempts: RequestAttempts,
        deadline: float | None,
        metadata: Metadata,
    ) -> GenerateResult | None:
        """Send a request and return the answer. Return None if the answer must be read as a resumed
        stream instead."""
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        data = GENERATE.encode(request)
        while True:
            channel = self._channels.current
            try:
                with convert_call_errors(self._channels):
                    method = channel.unary_unary(GENERATE.path)
                    timeout_s = remaining(deadline, time.monotonic())
                    answer = method(data, timeout=timeout_s, metadata=metadata)
                return GENERATE.decode(answer)
            except grpc.RpcError as error:
                problem = to_typed_error(error, self.address)
            replace_channel(self._channels, channel, problem)
            if wait_attempt(
                attempts.decide_after(problem, now=time.monotonic()), problem, deadline
            ):
                return None

    def _call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout_s: float | None
    ) -> ResponseT:
        data = rpc.encode(request)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        attempt = 1
        while True:
            channel = self._channels.current
            try:
                with convert_call_errors(self._channels):
                    method = channel.unary_unary(rpc.path)
                    left_s = remaining(deadline, time.monotonic())
                    answer = method(data, timeout=left_s, metadata=self._metadata)
                return rpc.decode(answer)
            except grpc.RpcError as error:
                problem = to_typed_error(error, self.address)
            replace_channel(self._channels, channel, problem)
            wait_retry(self._retry, attempt, problem, deadline)
            attempt += 1


class Stream:
    """Stream of an answer: an iterator of deltas and a context manager.

    Leaving the context before the end cancels the request. A lost connection is reopened and the
    stream continues after the last received delta, unless the request has `resume=False`.
    """

    def __init__(
        self,
        channels: ChannelPool[grpc.Channel],
        address: str,
        request: GenerateRequest,
        attempts: RequestAttempts,
        deadline: float | None,
        *,
        wanted: PendingRequests,
        metadata: Metadata,
        resume: bool = False,
    ) -> None:
        self._channels = channels
        self._channel: grpc.Channel
        """Channel of the present call."""
        self._address = address
        self._request = request
        self._attempts = attempts
        self._deadline = deadline
        self._wanted = wanted
        self._metadata = metadata
        self._resume = resume
        self._collected = CollectedStream()
        self._call: grpc._CallIterator[bytes] | None = None
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._over:
            problem: OutriderError | None = None
            try:
                delta = self._step()
            except grpc.RpcError as error:
                delta, problem = None, to_typed_error(error, self._address)
            except OutriderError as error:
                # The answer is malformed, or the client was closed.
                if not self._over:
                    self._collected.fail(error)
                    self._leave()
                raise
            if delta is not None:
                return delta
            if problem is not None and not self._over:
                self._recover(problem)
        raise StopIteration

    def result(self) -> GenerateResult:
        """Read the stream to its end and return the complete answer."""
        for _ in self:
            pass
        return self._collected.result()

    def close(self) -> None:
        """Cancel the request if it is still running; idempotent."""
        if not self._over:
            self._leave()

    def _step(self) -> Delta | None:
        if self._call is None:
            path, data, self._decode = stream_call(
                self._request, self._collected, resume=self._resume
            )
            method: grpc.UnaryStreamMultiCallable[bytes, bytes]
            self._channel = self._channels.current
            with convert_call_errors(self._channels):
                method = self._channel.unary_stream(path)
                timeout_s = remaining(self._deadline, time.monotonic())
                self._wanted.add_request(self._attempts, self._request, self._metadata)
                self._call = method(data, timeout=timeout_s, metadata=self._metadata)
        message = next(self._call, None)
        if message is not None:
            self._attempts.record_message()
            return self._collected.add_event(self._decode(message))
        self._end()
        return None

    def _recover(self, problem: OutriderError) -> None:
        self._call = None
        try:
            replace_channel(self._channels, self._channel, problem)
            again = self._attempts.decide_after(
                problem,
                informed=self._collected.info is not None,
                told=self._collected.has_tokens,
                now=time.monotonic(),
            )
            self._resume = wait_attempt(again, problem, self._deadline)
            if again.needs_new_id:
                self._request = with_new_id(self._request)
        except OutriderError as error:
            self._collected.fail(error)
            self._end()
            raise

    def _end(self) -> None:
        self._over = True
        self._wanted.remove_request(self._attempts)

    def _leave(self) -> None:
        """Stop reading, cancel the call and tell the router to abort the request."""
        self._over = True
        self._collected.fail(left_error())
        if self._call is not None:
            self._call.cancel()
        send_abort(self._channels, self._wanted.remove_request(self._attempts))
