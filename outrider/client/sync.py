"""The synchronous client; the twin of `outrider.client.aio`. Thread-safe."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from outrider.client.calls import (
    ABORT,
    DEFAULT_TIMEOUT_S,
    GENERATE,
    GENERATE_STREAM,
    INFO_TIMEOUT_S,
    LIST_MODELS,
    SERVER_INFO,
    Rpc,
    client_options,
    typed,
)
from outrider.client.collect import Collected
from outrider.client.options import GenerateOptions, PromptLike, make_request
from outrider.client.retry import RetryPolicy, remaining
from outrider.errors import OutriderError
from outrider.ids import RequestId
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateRequest,
    GenerateResult,
    ModelInfo,
    PromptInfo,
    ServerInfo,
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Client:
    """Client of one router; close it when done."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`address` is HOST:PORT; `timeout_s` bounds each request, its retries included."""
        self.address = address
        self._timeout_s = timeout_s
        self._retry = retry if retry is not None else RetryPolicy()
        self._channel = grpc.insecure_channel(address, options=client_options())

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
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Continue a prompt and return the complete answer. Raises any `OutriderError`."""
        return self._call(GENERATE, make_request(prompt, options), self._limit(timeout_s))

    def stream(
        self,
        prompt: PromptLike,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Continue a prompt and iterate over the text as it comes."""
        limit_s = self._limit(timeout_s)
        return Stream(
            self._channel, self.address, make_request(prompt, options), self._retry, limit_s
        )

    def abort(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Cancel requests by id; those of the ids that were queued or running."""
        ids = [RequestId(request_id) for request_id in request_ids]
        return self._call(ABORT, ids, INFO_TIMEOUT_S)

    def server_info(self) -> ServerInfo:
        """The router's state and that of its fleet."""
        return self._call(SERVER_INFO, None, INFO_TIMEOUT_S)

    def models(self) -> tuple[ModelInfo, ...]:
        """Served models."""
        return self._call(LIST_MODELS, None, INFO_TIMEOUT_S)

    def _limit(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout_s: float | None
    ) -> ResponseT:
        data = rpc.encode(request)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        method = self._channel.unary_unary(rpc.path)
        attempt = 1
        while True:
            try:
                answer = method(data, timeout=remaining(deadline, time.monotonic()))
                return rpc.decode(answer)
            except grpc.RpcError as error:
                problem = typed(error, self.address)
            _pause(self._retry, attempt, problem, deadline)
            attempt += 1


class Stream:
    """An answer as it comes: an iterator of deltas and a context manager.

    Leaving the context before the end cancels the request. Until the first delta a lost
    connection is retried.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        request: GenerateRequest,
        retry: RetryPolicy,
        timeout_s: float | None,
    ) -> None:
        self._method: grpc.UnaryStreamMultiCallable[bytes, bytes]
        self._method = channel.unary_stream(GENERATE_STREAM.path)
        self._data = GENERATE_STREAM.encode(request)
        self._address = address
        self._retry = retry
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._collected = Collected()
        self._call: grpc._CallIterator[bytes] | None = None
        self._attempt = 1
        self._over = False

    @property
    def info(self) -> PromptInfo | None:
        """The request's id and prompt length, once the server admitted it."""
        return self._collected.info

    @property
    def finish(self) -> FinishInfo | None:
        """How the answer ended, once it has."""
        return self._collected.finish

    @property
    def text(self) -> str:
        """The text so far."""
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
                delta, problem = None, typed(error, self._address)
            if delta is not None:
                return delta
            if problem is not None and not self._over:
                self._recover(problem)
        raise StopIteration

    def result(self) -> GenerateResult:
        """Read to the end and return the complete answer."""
        for _ in self:
            pass
        return self._collected.result()

    def close(self) -> None:
        """End the request; idempotent."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    def _step(self) -> Delta | None:
        if self._call is None:
            timeout_s = remaining(self._deadline, time.monotonic())
            self._call = self._method(self._data, timeout=timeout_s)
        data = next(self._call, None)
        if data is not None:
            return self._collected.add(GENERATE_STREAM.decode(data))
        self._over = True
        return None

    def _recover(self, problem: OutriderError) -> None:
        self._call = None
        if self._collected.heard_tokens:
            self._over = True
            raise problem
        try:
            _pause(self._retry, self._attempt, problem, self._deadline)
        except OutriderError:
            self._over = True
            raise
        self._attempt += 1


def _pause(
    retry: RetryPolicy, attempt: int, problem: OutriderError, deadline: float | None
) -> None:
    """Wait before the next attempt; raises `problem` if there is to be none."""
    delay_s = retry.delay_s(attempt, problem)
    left_s = remaining(deadline, time.monotonic())
    if delay_s is None or (left_s is not None and delay_s >= left_s):
        raise problem
    time.sleep(delay_s)
