"""Forwarding of resumed streams to the router of the fleet that has the request.

A router that does not have a request asks all other routers at once. A router that has it answers
with the metadata field `FOUND_KEY` and then with the stream. A forwarded call carries
`FORWARDED_KEY` and is never forwarded again. It also carries the client's credentials, by which the
other router checks the tenant itself. Addresses come from the configuration and from DNS, never
from clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import (
    InternalError,
    InvalidMessageError,
    NotFoundError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.grpc import GrpcDialer
from outrider.transport.grpc.draining_channel import ServerStream
from outrider.transport.grpc.error_status import to_lost_error
from outrider.transport.tls import CertificateRole
from outrider.wire.inference_response_codec import resumed_event_from_pb
from outrider.wire.v1 import inference_pb2 as pb
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.reasons import ForwardOutcome
from outrider_router.base.tenants import AUTHORIZATION_KEY, TENANT_KEY
from outrider_router.requests.parsed_answer import EventWriter

Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
OpenCall: TypeAlias = "Callable[[str], ServerStream]"
"""Function that calls ResumeStream of the router at an address."""

FORWARDED_KEY: Final = "x-outrider-forwarded"
"""Metadata key of calls that a router forwards. They are answered here or not at all."""
FOUND_KEY: Final = "x-outrider-found"
"""Key of the initial metadata of forwarded calls whose request this router has."""
LOOKUP_TIMEOUT_S = 2.0
"""Time in seconds within which the other routers must say whether they have a request. It includes
the time that the lookup waits for others (`MAX_LOOKUPS`)."""
MAX_LOOKUPS = 32
"""Largest number of requests that are looked up on other routers at the same time. Further ones
wait.
"""
UNREACHABLE_RETRY_S = 1.0
"""Retry hint in seconds if a router that may have the request does not answer."""
_RESUME_STREAM = "/outrider.wire.v1.InferenceService/ResumeStream"
_CREDENTIALS = (AUTHORIZATION_KEY, TENANT_KEY)
"""Metadata fields that identify a client."""


def is_forwarded(metadata: Metadata) -> bool:
    """Return whether another router has forwarded the call with this metadata."""
    return any(key == FORWARDED_KEY for key, _ in metadata)


class StreamForwarder:
    """Finds the router that has a request, and passes its stream on. Asyncio thread only."""

    def __init__(
        self,
        addresses: Callable[[], Collection[str]],
        dialer: GrpcDialer,
        metrics: RouterMetrics,
        *,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> None:
        """Create a forwarder. `addresses` returns the addresses (HOST:PORT) of the fleet's routers;
        this router's own may be among them. `dialer` opens channels to them and is used for nothing
        else.
        """
        self._addresses = addresses
        self._dialer = dialer
        self._metrics = metrics
        self._lookup_timeout_s = lookup_timeout_s
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._num_running = 0
        """Number of lookups that are running. They share channels."""

    async def forward_stream(
        self,
        request: pb.ResumeStreamRequest,
        metadata: Metadata,
        write: EventWriter,
        *,
        timeout_s: float | None,
    ) -> None:
        """Pass the stream of a request from the router that has it to `write`.

        `metadata` is that of the client's call, and `timeout_s` its remaining time in seconds or
        None. Raises the error with which the other router ends the stream, NotFoundError if no
        router has the request, and UnavailableError (ROUTER_UNREACHABLE) if a router that may have
        it does not answer.
        """
        passed = [(key, value) for key, value in metadata if key in _CREDENTIALS]
        message = request.SerializeToString()

        def open_call(address: str) -> ServerStream:
            return self._dialer.server_stream(
                address,
                _RESUME_STREAM,
                message,
                role=CertificateRole.ROUTER,
                metadata=[*passed, (FORWARDED_KEY, "1")],
                timeout_s=timeout_s,
            )

        address, stream = await self._find_stream(open_call, request.request_id)
        try:
            await _copy_events(address, stream, write)
        finally:
            stream.cancel()

    async def _find_stream(self, open_call: OpenCall, request_id: str) -> tuple[str, ServerStream]:
        """Ask all routers. Return the address of the one that has the request, and its stream."""
        addresses = sorted(self._addresses())
        # Without a known address, DNS has not answered yet.
        unreachable = [] if addresses else ["no other router is known yet"]
        try:
            async with asyncio.timeout(self._lookup_timeout_s), self._lookups:
                found = await self._ask_routers(addresses, open_call, unreachable)
        except TimeoutError:
            found = None
            unreachable.append("no answer in time")
        if found is not None:
            self._count(ForwardOutcome.FOUND)
            return found
        if unreachable:
            self._count(ForwardOutcome.UNREACHABLE)
            raise UnavailableError(
                f"request {request_id!r} is not here, and a router that may have it does not "
                f"answer: {unreachable[0]}",
                reason="ROUTER_UNREACHABLE",
                retry_after_s=UNREACHABLE_RETRY_S,
            )
        self._count(ForwardOutcome.NOT_FOUND)
        raise NotFoundError(
            f"no resumable request {request_id!r} is running or ended recently", reason="NO_STREAM"
        )

    async def _ask_routers(
        self, addresses: Sequence[str], open_call: OpenCall, unreachable: list[str]
    ) -> tuple[str, ServerStream] | None:
        self._num_running += 1
        try:
            return await _find_first(addresses, open_call, unreachable)
        finally:
            self._num_running -= 1
            if not self._num_running:
                # Lookups are rare. With new channels, a later one connects at once to a router that
                # was down. The stream that was found goes on, on its channel.
                self._dialer.retire_channels()

    def _count(self, outcome: ForwardOutcome) -> None:
        self._metrics.forwarded_streams.labels(outcome).inc()


async def _find_first(
    addresses: Sequence[str], open_call: OpenCall, unreachable: list[str]
) -> tuple[str, ServerStream] | None:
    """Return the address of the first router that says that it has the request, and its stream;
    None if none does. Cancel all other calls, and add the reasons of routers that do not say
    whether they have it to `unreachable`.
    """
    calls: dict[str, ServerStream] = {}
    tasks: list[asyncio.Task[str | OutriderError]] = []
    found = None
    try:
        for address in addresses:
            calls[address] = open_call(address)
            tasks.append(asyncio.create_task(_ask(address, calls[address])))
        for next_answer in asyncio.as_completed(tasks):
            answer = await next_answer
            if isinstance(answer, str):
                found = answer
                break
            if not isinstance(answer, NotFoundError):
                unreachable.append(answer.message)
    finally:
        for task in tasks:
            task.cancel()
        for address, call in calls.items():
            if address != found:
                call.cancel()
    return None if found is None else (found, calls[found])


async def _ask(address: str, call: ServerStream) -> str | OutriderError:
    """Wait until a router says whether it has the request. Return its address if it has, otherwise
    the error.
    """
    try:
        if any(key == FOUND_KEY for key, _ in await call.initial_metadata() or ()):
            return address
        await call.read()
    except grpc.aio.AioRpcError as error:
        return to_lost_error(error, peer=address)
    return UnavailableError(f"{address} does not answer forwarded calls", reason="NOT_FORWARDED")


async def _copy_events(address: str, call: ServerStream, write: EventWriter) -> None:
    try:
        while isinstance(data := await call.read(), bytes):
            await write(resumed_event_from_pb(pb.ResumeStreamResponse.FromString(data)))
    except grpc.aio.AioRpcError as error:
        raise to_lost_error(error, peer=address) from None
    except (InvalidMessageError, DecodeError) as error:
        raise InternalError(
            f"the answer of {address} is malformed: {error}", reason="BAD_RESPONSE"
        ) from error
